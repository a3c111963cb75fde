"""COMBO: every segment is pulled from some workers that are drawn, whom nobody balances."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sordino._core import RandomPull, Topology
from sordino.algorithms.base import Simulation
from sordino.algorithms.checks import NO_BUFFERS, require
from sordino.algorithms.gossip import RandomGossip
from sordino.runtime.segments import Segments


@dataclass(frozen=True)
class SegmentedGossip(RandomGossip):
    """COMBO: after its own step each worker pulls every segment from `replicas` random others and averages.

    Over the segments it asks every other worker when segments * replicas >= N - 1. Nobody balances who is asked.

    Received per exchange and worker: `replicas` times the bytes of the parameters; sent: as much on average, between
    nothing and N - 1 times as much. Staleness: none. Memory: the parameters of `replicas` peers on other nodes. When a
    peer dies: as Crossover. Source: Hu et al. 2019, section 3.

    Attributes:
        replicas: workers that each segment is pulled from.
    """

    segments: Segments | Sequence[str] = "blocks"
    replicas: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require(isinstance(self.replicas, int) and self.replicas >= 1, self, "replicas", "must be at least 1")

    simulation = Simulation(
        arrays="sordino.simulate.vectorized:Mixing",
        imitated=frozenset({"interval", "segments", "seed", "replicas"}),
        refused={"buffers": NO_BUFFERS},
    )

    def rounds_of(self, size: int, segment_count: int) -> list[Topology]:
        return [RandomPull(size, self.seed, max(segment_count, 1), self.replicas)]

    def fitted(self, before: Sequence[int], now: Sequence[int]) -> SegmentedGossip:
        return replace(self, replicas=min(self.replicas, max(1, len(now) - 1)))
