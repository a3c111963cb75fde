"""Time of a step of ResNet-50 on the source's cluster, by the cost functions of `sordino plan`.

The source's description of its cluster gives bounds of the hardware: peak rate of the GPUs, rate of the links, and
interface of the disks. The time of software per message, tensor and hop of a ring is measured between emulated hosts.
Nothing is fitted to the source's measurements.
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
_PEAK = 2 * 2496 * 0.875e9  # floating-point operations per second of a GK210: 2 per multiply-add, cores, Hz
_WORK = 3 * 2 * 3.8e9  # operations per image: 3.8e9 multiply-adds (He et al. 2016), backward twice forward
_LINK = 100e9 / 8  # bytes per second of InfiniBand EDR
_BUS = 15.75e9 / 2  # bytes per second of a GPU: two share 16 lanes of PCIe 3
_DISK = 12e9 / 8  # bytes per second of SAS-3
_IMAGE = 108e3  # bytes per image of ImageNet: 138 GB in 1.28 million training images

COMPUTING = BATCH * _WORK / _PEAK
"""Seconds of computation at a GPU's peak rate. So predicted shares of communication are upper bounds."""
LOADING = ON_A_NODE * BATCH * _IMAGE / _DISK
"""Least seconds that a node needs to read its mini-batches from its disk."""


def links(mbps: float | None, ranks_per_host: int, budget: float) -> Results:
    """Measure the costs of messages, tensors and hops between two emulated hosts (`sordino.plan.measure`).

    Raises:
        SordinoError: the job failed, or this machine cannot emulate hosts.
    """
    words = ["--budget", f"{budget:g}"]
    return dict(run_on_hosts(2, ranks_per_host, mbps, "claims.layered.links_worker", words)["rates"])


def links_run(quick: bool) -> Run:
    """Return the measurement as a run."""
    budget = 2.0 if quick else 15.0
    return Run("claims.layered.model:links", {"mbps": None, "ranks_per_host": 2, "budget": budget}, alone=True)


@dataclass(frozen=True)
class Cluster:
    """The source's cluster.

    Attributes:
        software: rates measured here; only the costs of software are used.
    """

    software: Rates

    @cached_property
    def rates(self) -> Rates:
        """Rates of the source's hardware at its nominal speed, with our software."""
        measured = self.software
        across = measured.across.alpha if measured.across is not None else 0.0
        inside = measured.inside.alpha if measured.inside is not None else 0.0
        return Rates(
            Line(inside, 1 / _BUS), Line(across, 1 / _LINK), measured.agreement, measured.hop, measured.handling
        )

    def seconds(self, algorithm: Algorithm, workers: int, loading: float = 0.0, overlap: bool = False) -> float:
        """Return the seconds of a step without loading.

        Args:
            algorithm: AllReduce or Layered.
            workers: number of workers.
            loading: seconds of loading between two steps, which hide Layered's communication.
            overlap: whether backward hides communication too. In the source it does not.
        """
        shapes = resnet50_shapes()
        names, sizes = [name for name, _ in shapes], [4 * math.prod(shape) for _, shape in shapes]
        nodes = [rank // ON_A_NODE for rank in range(workers)]
        hides = COMPUTING if overlap else 0.0
        return COMPUTING + cost_of(algorithm, nodes, names, sizes).exposed(self.rates, hides, loading)

    def tensor_by_tensor(self, workers: int, hop: float | None = None) -> float:
        """Return the seconds of a step that all-reduces gradients one after the other over a ring of all workers.

        Args:
            workers: number of workers.
            hop: seconds of a hop; None: as measured.
        """
        load, rates = tensor_by_tensor(workers), self.rates
        if hop is not None:
            rates = Rates(rates.inside, rates.across, 0.0, hop, 0.0)
        return COMPUTING + load.seconds(rates)


def tensor_by_tensor(workers: int) -> Load:
    """Return the load of a step in which each of ResNet-50's 161 gradients has its own all-reduce over all workers.

    This models one call of MPI_Allreduce for each gradient in turn. Large gradients go around a ring of workers. The
    workers of a node are neighbors in it, so a node's link carries the ring once in each direction.
    """
    load = Load(list(range(workers)))
    for _, shape in resnet50_shapes():
        load.all_reduce([list(range(workers))], 4 * math.prod(shape))
    load.gradients = len(resnet50_shapes())
    return load


def hop_that_explains(efficiency: float, workers: int, cluster: Cluster) -> float:
    """Return the seconds of a hop with which all-reduces tensor by tensor have this efficiency against one node."""
    alone = cluster.tensor_by_tensor(ON_A_NODE, 0.0)
    rest, hops = cluster.tensor_by_tensor(workers, 0.0), tensor_by_tensor(workers).hops
    before = tensor_by_tensor(ON_A_NODE).hops
    # (alone + before h) / (rest + hops h) = efficiency
    return (alone - efficiency * rest) / (efficiency * hops - before)


def efficiencies(cluster: Cluster) -> dict[str, list[float]]:
    """Return throughput per worker in percent of one node's, by algorithm, for all COUNTS."""
    ways = {
        "AllReduce": [cluster.seconds(AllReduce(), workers) for workers in COUNTS],
        "AllReduce, overlapped": [cluster.seconds(AllReduce(), workers, overlap=True) for workers in COUNTS],
        "Layered": [cluster.seconds(Layered(ON_A_NODE), workers, LOADING) for workers in COUNTS],
        "AllReduce, tensor by tensor": [cluster.tensor_by_tensor(workers) for workers in COUNTS],
    }
    return {way: [100 * seconds[0] / one for one in seconds] for way, seconds in ways.items()}
