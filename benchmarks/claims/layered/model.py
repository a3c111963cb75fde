"""What a step of ResNet-50 takes on the source's cluster, by the cost functions of `sordino plan`.

What the source says of its cluster says how fast it is at best: its GPUs' peak, its links' rate, its disks' interface.
What it does not say, what software takes for a message, a tensor and a hop of a ring, is measured between emulated
hosts. Nothing is fitted to what the source measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from claims.claim import Run
from cluster.jobs import run_on_hosts
from sordino.algorithms import Algorithm, AllReduce, Layered
from sordino.bench.resnet import resnet50_shapes
from sordino.plan import Line, Load, Rates, cost_of
from sordino.report import Results

ON_A_NODE, COUNTS = 4, (4, 8, 16, 32, 64, 128, 256)
BATCH = 64  # images of a worker
_PEAK = 2 * 2496 * 0.875e9  # floating-point operations a second of a GK210: multiply-adds, cores, Hz
_WORK = 3 * 2 * 3.8e9  # operations an image: forward and twice that backward; 3.8e9 multiply-adds (He et al. 2016)
_LINK = 100e9 / 8  # bytes a second of InfiniBand EDR
_BUS = 15.75e9 / 2  # bytes a second of a GPU: two share a board's 16 lanes of PCIe 3
_DISK = 12e9 / 8  # bytes a second of SAS-3
_IMAGE = 108e3  # bytes of an image of ImageNet's training part: 138 GB of 1.28 million

COMPUTING = BATCH * _WORK / _PEAK
"""Seconds: no GPU is quicker than its peak, so communication's share is at most what comes out here."""
LOADING = ON_A_NODE * BATCH * _IMAGE / _DISK
"""Seconds that a node's mini-batches take from its disk, at least."""


def links(mbps: float | None, ranks_per_host: int, budget: float) -> Results:
    """Measure what messages, tensors and hops take between two emulated hosts (`sordino.plan.measure`).

    Raises:
        SordinoError: it failed, or there can be no such hosts here.
    """
    words = ["--budget", f"{budget:g}"]
    return dict(run_on_hosts(2, ranks_per_host, mbps, "claims.layered.links_worker", words)["rates"])


def links_run(quick: bool) -> Run:
    """The measurement as a run."""
    budget = 2.0 if quick else 15.0
    return Run("claims.layered.model:links", {"mbps": None, "ranks_per_host": 2, "budget": budget}, alone=True)


@dataclass(frozen=True)
class Cluster:
    """The source's cluster.

    Attributes:
        software: rates measured here, of which what software takes is used.
    """

    software: Rates

    @cached_property
    def rates(self) -> Rates:
        """What the source's hardware costs at its nominal speed, with our software."""
        measured = self.software
        across = measured.across.alpha if measured.across is not None else 0.0
        inside = measured.inside.alpha if measured.inside is not None else 0.0
        return Rates(
            Line(inside, 1 / _BUS), Line(across, 1 / _LINK), measured.agreement, measured.hop, measured.handling
        )

    def seconds(self, algorithm: Algorithm, workers: int, loading: float = 0.0, overlap: bool = False) -> float:
        """Return what a step takes, apart from loading.

        Args:
            algorithm: AllReduce, or Layered.
            workers: how many.
            loading: seconds between two steps, behind which Layered communicates.
            overlap: whether backward hides communication, too; it does not in the source.
        """
        shapes = resnet50_shapes()
        names, sizes = [name for name, _ in shapes], [4 * math.prod(shape) for _, shape in shapes]
        nodes = [rank // ON_A_NODE for rank in range(workers)]
        hides = COMPUTING if overlap else 0.0
        return COMPUTING + cost_of(algorithm, nodes, names, sizes).exposed(self.rates, hides, loading)

    def tensor_by_tensor(self, workers: int, hop: float | None = None) -> float:
        """Return what a step takes whose gradients are all-reduced one after the other, over a ring of all workers.

        Args:
            workers: how many.
            hop: seconds; None: as measured.
        """
        load, rates = tensor_by_tensor(workers), self.rates
        if hop is not None:
            rates = Rates(rates.inside, rates.across, 0.0, hop, 0.0)
        return COMPUTING + load.seconds(rates)


def tensor_by_tensor(workers: int) -> Load:
    """Return what is sent if each of ResNet-50's 161 gradients has an all-reduce of its own over all workers.

    What comes of calling MPI_Allreduce for each in turn: large ones go round a ring of workers, of which those of a
    node are neighbours, so that a node's link carries the ring once in each direction.
    """
    load = Load(list(range(workers)))
    for _, shape in resnet50_shapes():
        load.all_reduce([list(range(workers))], 4 * math.prod(shape))
    load.gradients = len(resnet50_shapes())
    return load


def hop_that_explains(efficiency: float, workers: int, cluster: Cluster) -> float:
    """Return what a hop must take for all-reduces tensor by tensor to be so efficient, against one node."""
    alone = cluster.tensor_by_tensor(ON_A_NODE, 0.0)
    rest, hops = cluster.tensor_by_tensor(workers, 0.0), tensor_by_tensor(workers).hops
    before = tensor_by_tensor(ON_A_NODE).hops
    # (alone + before h) / (rest + hops h) = efficiency
    return (alone - efficiency * rest) / (efficiency * hops - before)


def efficiencies(cluster: Cluster) -> dict[str, list[float]]:
    """Return percent of one node's throughput a worker, by algorithm, for all COUNTS."""
    ways = {
        "AllReduce": [cluster.seconds(AllReduce(), workers) for workers in COUNTS],
        "AllReduce, overlapped": [cluster.seconds(AllReduce(), workers, overlap=True) for workers in COUNTS],
        "Layered": [cluster.seconds(Layered(ON_A_NODE), workers, LOADING) for workers in COUNTS],
        "AllReduce, tensor by tensor": [cluster.tensor_by_tensor(workers) for workers in COUNTS],
    }
    return {way: [100 * seconds[0] / one for one in seconds] for way, seconds in ways.items()}
