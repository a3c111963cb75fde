"""What every algorithm takes on some clusters, by the cost model of `sordino plan`: the table of docs/choosing.md.

The clusters are made up, and say what they assume; `sordino plan` measures a real one and applies the same functions.
"""

from __future__ import annotations

from dataclasses import dataclass

from sordino.algorithms import class_of
from sordino.bench.resnet import resnet50_shapes
from sordino.plan.costs import Line, Rates
from sordino.plan.predictions import Job, predict, recommend
from sordino.report.tables import format_seconds, table

INTERVAL = 8
"""Steps of local SGD between two averagings, as in `sordino plan`."""
JOB = Job(resnet50_shapes(), compute=0.1, samples=1_281_167, batch=32)
MODEL = ([name for name, _ in JOB.shapes], JOB.bytes)
_MEMORY = Line(20e-6, 1e-10)  # 10 GB/s, read and written
_AGREEMENT = 50e-6
_BEST = 6  # rows a cluster, beside AllReduce


@dataclass(frozen=True)
class Cluster:
    """Nodes and their links.

    Attributes:
        name: what it is like.
        nodes: how many, of `ranks` each.
        gbps: of a node's link, in each direction.
        latency: seconds a message.
    """

    name: str
    nodes: int
    ranks: int
    gbps: float = 0.0
    latency: float = 0.0

    @property
    def places(self) -> list[int]:
        """The node of each rank."""
        return [rank // self.ranks for rank in range(self.nodes * self.ranks)]

    @property
    def rates(self) -> Rates:
        """What things cost there."""
        across = Line(self.latency, 8e-9 / self.gbps) if self.nodes > 1 else None
        return Rates(_MEMORY if self.ranks > 1 else None, across, _AGREEMENT, self.latency)

    @property
    def described(self) -> str:
        """What is assumed."""
        what = f"{self.nodes} node{'s' * (self.nodes > 1)} of {self.ranks} rank{'s' * (self.ranks > 1)}"
        if self.nodes == 1:
            return what
        return f"{what}, links of {self.gbps:g} Gbit/s and {format_seconds(self.latency)} a message"


CLUSTERS = (
    Cluster("One machine", 1, 4),
    Cluster("A fast network", 8, 4, 100.0, 5e-6),
    Cluster("Ethernet", 8, 4, 10.0, 30e-6),
    Cluster("One rank a machine, Ethernet", 8, 1, 10.0, 30e-6),
    Cluster("Over the internet", 4, 1, 0.5, 20e-3),
)


def markdown() -> str:
    """Return a table for each cluster, with the recommendation that `sordino plan` would make."""
    blocks = []
    for cluster in CLUSTERS:
        found = predict(JOB, cluster.places, cluster.rates, INTERVAL)
        base = next(one for one in found if one.algorithm == class_of("allreduce")())
        shown = [one for place, one in enumerate(found) if place < _BEST or one is base]
        rows = [
            [
                f"`{one.name}`",
                format_seconds(one.communication),
                format_seconds(one.exposed),
                f"{base.step / one.step:.2f}",
                str(one.algorithm.models(len(cluster.places))),
            ]
            for one in shown
        ]
        heads = ["Algorithm", "communication a step", "of it not hidden", "speed, all-reduce = 1", "models that differ"]
        blocks += [
            f"**{cluster.name}**: {cluster.described}.",
            table(heads, rows),
            f"`sordino plan` would say: {recommend(found, len(cluster.places), None)}",
        ]
    return "\n\n".join(blocks)
