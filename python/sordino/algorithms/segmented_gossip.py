"""COMBO (segmented gossip): each worker pulls each segment from random peers, without load balancing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sordino._core import RandomPull, Topology
from sordino.algorithms.base import Simulation
from sordino.algorithms.checks import NO_BUFFERS, require
from sordino.algorithms.gossip import RandomGossip
from sordino.runtime.exchange.segments import Segments


@dataclass(frozen=True)
class SegmentedGossip(RandomGossip):
    """COMBO: after its own step each worker pulls every segment from `replicas` random peers and averages.

    Over all segments it asks every peer at least once if segments * replicas >= N - 1. The load of peers is not
    balanced.

    Received per exchange and worker: `replicas` times the bytes of the parameters; sent: the same on average, from 0 to
    N - 1 times the bytes of the parameters. Staleness: none. Memory: the parameters of `replicas` peers on other nodes.
    When a peer dies: as Crossover. Source: Hu et al. 2019, section 3.

    Attributes:
        replicas: number of peers that each segment is pulled from.
    """

    segments: Segments | Sequence[str] = "blocks"
    replicas: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.replicas >= 1, self, "replicas", "must be at least 1")

    simulation = Simulation(
        arrays="mixing",
        imitated=frozenset({"interval", "segments", "seed", "replicas"}),
        refused={"buffers": NO_BUFFERS},
    )

    def rounds_of(self, size: int, segment_count: int) -> list[Topology]:
        return [RandomPull(size, self.seed, max(segment_count, 1), self.replicas)]

    def fitted(self, before: Sequence[int], now: Sequence[int]) -> SegmentedGossip:
        return replace(self, replicas=min(self.replicas, max(1, len(now) - 1)))
