"""Strategy for DiLoCo: gossip whose exchange is an outer step, and which can show the outer parameters."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from sordino.algorithms.diloco import DiLoCo
from sordino.algorithms.diloco.outer import OuterStep
from sordino.algorithms.gossip.strategy import GossipStrategy
from sordino.runtime.exchange.rollback import take_mean


class DiLoCoStrategy(GossipStrategy):
    """Strategy for `DiLoCo`."""

    algorithm: DiLoCo
    asked: DiLoCo
    mixes_buffers = False  # statistics take no outer steps, which could make a variance negative

    def outer_parameters(self) -> AbstractContextManager[None]:
        if not isinstance(self._mixing, OuterStep):  # no step yet, or no other rank
            return nullcontext()
        return self._mixing.outer_parameters()

    def _mix(self) -> None:
        super()._mix()
        if self.buffers and (self.round + 1) % self.algorithm.fragments == 0:
            take_mean([buffer for _, buffer in self.buffers], "diloco.buffers", self.settings.process_set)
