"""Clusters that are assumed, not present: their nodes and links, for predictions by the cost model."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from sordino.errors import UsageError
from sordino.plan.costs import Line, Rates
from sordino.report.tables import format_seconds

_MEMORY = Line(20e-6, 1e-10)  # 10 GB/s, for reads and writes
_AGREEMENT = 50e-6  # seconds


@dataclass(frozen=True)
class Cluster:
    """Nodes and their links.

    Attributes:
        nodes: number of nodes, each with `ranks` ranks.
        gbps: rate of a node's link in each direction, in 10^9 bits per second.
        latency: seconds per message.
    """

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
        """Costs of messages and memory on this cluster."""
        across = Line(self.latency, 8e-9 / self.gbps) if self.nodes > 1 else None
        return Rates(_MEMORY, across, _AGREEMENT, self.latency)

    @property
    def described(self) -> str:
        """Description of the assumptions."""
        what = f"{self.nodes} node{'s' * (self.nodes > 1)} of {self.ranks} rank{'s' * (self.ranks > 1)}"
        if self.nodes == 1:
            return what
        return f"{what}, links of {self.gbps:g} Gbit/s and {format_seconds(self.latency)} per message"


def parse_cluster(nodes: str, gbps: float | None, latency_us: float) -> Cluster:
    """Parse NODESxRANKS: 4x2 is 4 nodes of 2 ranks.

    Args:
        nodes: the text, as on the command line.
        gbps: rate of a node's link; needed for more than one node.
        latency_us: microseconds per message.

    Raises:
        UsageError: a value is invalid.
    """
    match = re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,3})", nodes)
    if match is None:
        raise UsageError(f"--nodes {nodes}: expected NODESxRANKS, as in 4x2 for 4 nodes of 2 ranks")
    count, ranks = int(match[1]), int(match[2])
    if count * ranks < 2:
        raise UsageError(f"--nodes {nodes}: a single rank does not communicate; give at least 2 ranks")
    if count > 1 and gbps is None:
        raise UsageError(f"--nodes {nodes}: give the rate of a node's link, as in --gbps 10")
    for name, value, least in (("gbps", gbps, 1e-6), ("latency-us", latency_us, 0.0)):
        if value is not None and not (math.isfinite(value) and value >= least):
            raise UsageError(f"--{name} {value:g}: must be {'above' if least else 'at least'} 0")
    return Cluster(count, ranks, gbps or 0.0, latency_us * 1e-6)
