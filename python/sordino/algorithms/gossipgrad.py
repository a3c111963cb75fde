"""GossipGraD: partners at distances that double from round to round, under a permutation that changes periodically."""

from __future__ import annotations

from dataclasses import dataclass

from sordino._core import Dissemination, Topology
from sordino.algorithms.base import Simulation
from sordino.algorithms.checks import NO_BUFFERS
from sordino.algorithms.gossip import RandomGossip


@dataclass(frozen=True)
class GossipGraD(RandomGossip):
    """GossipGraD: after its own step each worker averages with the rank 2^(t mod log2 N) places before it.

    Ranks are counted under a permutation that is drawn again every ceil(log2 N) rounds. Within these rounds the values
    of every worker reach all others.

    Sent per exchange and worker: the bytes of the parameters, one message per segment. Staleness: none. Memory: the
    parameters of one peer if it is on another node. When a peer dies: as Crossover.
    Source: Daily et al. 2018, sections 4.3 and 4.5.
    """

    simulation = Simulation(
        arrays="mixing",
        imitated=frozenset({"interval", "segments", "seed"}),
        refused={"buffers": NO_BUFFERS},
    )

    def rounds_of(self, size: int, segment_count: int) -> list[Topology]:
        return [Dissemination(size, self.seed)]
