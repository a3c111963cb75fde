"""Strategy for DiLoCo: gossip whose exchange is an outer step.

With overlap τ, the exchange after step s begins an all-reduce, and the outer step follows after step s + τ:

  step          s                     s + τ                      s + interval / fragments
  after it      begin fragment k      wait, outer step of k      begin fragment k + 1

τ is below interval / fragments, so at most one fragment is in flight.
"""

from __future__ import annotations

from typing import Any

from sordino.algorithms.diloco import DiLoCo
from sordino.algorithms.diloco.outer import OuterStep
from sordino.algorithms.gossip.strategy import OuterStrategy
from sordino.runtime.exchange.rollback import take_mean
from sordino.runtime.recovery.losses import again


class DiLoCoStrategy(OuterStrategy):
    """Strategy for `DiLoCo`."""

    algorithm: DiLoCo
    asked: DiLoCo
    mixes_buffers = False  # statistics take no outer steps, which could make a variance negative

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with the mean of a fragment in flight. Wait until all ranks have begun that exchange."""
        return again(self.context, super().state_dict)

    def after_step(self) -> None:
        super().after_step()
        assert self._arena is not None and isinstance(self._mixing, OuterStep)
        if self._mixing.pending and self.steps % self.algorithm.every >= self.algorithm.overlap:
            self._arena.adopt()
            self._mixing.apply()
            self._arena.give_back()

    def _mix(self) -> None:
        super()._mix()
        if self.buffers and (self.round + 1) % self.algorithm.fragments == 0:
            take_mean([buffer for _, buffer in self.buffers], "diloco.buffers", self.settings.process_set)
