"""D-PSGD: every worker averages with its two neighbors on a ring."""

from __future__ import annotations

from dataclasses import dataclass

from sordino._core import Ring, Topology
from sordino.algorithms.base import Simulation
from sordino.algorithms.checks import NO_BUFFERS
from sordino.algorithms.gossip import AveragingGossip


@dataclass(frozen=True)
class DPSGD(AveragingGossip):
    """D-PSGD: after its own step each worker averages its parameters with those of its two neighbors on a ring.

    w_i = (w_{i-1} + w_i + w_{i+1}) / 3, for two workers / 2: a symmetric, doubly stochastic mixing.

    Sent per exchange and worker: twice the bytes of the parameters (once for two workers), two messages per segment.
    Staleness: none. Memory: the parameters of neighbors on other nodes. When a peer dies: as Crossover.
    Source: Lian et al. 2017, Algorithm 1 (mixing after the local step instead of concurrently).
    """

    simulation = Simulation(
        arrays="mixing",
        imitated=frozenset({"interval", "segments"}),
        refused={"buffers": NO_BUFFERS},
    )

    def rounds_of(self, size: int, segment_count: int) -> list[Topology]:
        return [Ring(size)]
