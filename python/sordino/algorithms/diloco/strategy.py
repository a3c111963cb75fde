"""Strategy for DiLoCo: gossip whose exchange is an outer step.

With overlap τ, the exchange after step s begins an all-reduce, and the outer step follows after step s + τ:

  step          s                     s + τ                      s + interval / fragments
  after it      begin fragment k      wait, outer step of k      begin fragment k + 1

τ is below interval / fragments, so at most one fragment is in flight.
"""

from __future__ import annotations

from typing import Any

import torch

from sordino.algorithms.diloco import DiLoCo
from sordino.algorithms.diloco.outer import OuterStep
from sordino.algorithms.gossip.strategy import OuterStrategy
from sordino.algorithms.strategy import Strategy
from sordino.runtime.exchange.rollback import take_mean
from sordino.runtime.recovery.losses import again


class DiLoCoStrategy(OuterStrategy):
    """Strategy for `DiLoCo`."""

    algorithm: DiLoCo
    asked: DiLoCo
    mixes_buffers = False  # statistics take no outer steps, which could make a variance negative

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with the mean of a fragment in flight. Waits until all ranks have begun that exchange."""
        return again(self.context, super().state_dict)

    def take_over(self, old: Strategy) -> None:
        if isinstance(old, DiLoCoStrategy) and old.outer_step is not None and self.outer_step is not None:
            carried = old.outer_step.carried()
            if carried is not None:
                self.load_state_dict(old.carried_state())
                self.outer_step.carry(carried)
                again(self.context, self._begin_outer_step)
                return
        # The outer step begins with the next step. Its `begin` is collective, so a process that has just joined must
        # not call it here, where the other ranks may not.
        super().take_over(old)

    def give_up(self) -> None:
        super().give_up()
        if self.outer_step is not None:
            self.outer_step.give_up()  # an encoded mean in flight reserves a name, which a grown world uses again

    def _begin_outer_step(self) -> None:
        if self.active and self.outer_step is not None:
            self.outer_step.begin()

    def _meet_anew(self, optimizer: torch.optim.Optimizer) -> None:
        before = self.outer_step
        super()._meet_anew(optimizer)
        after = self.outer_step
        if before is not None and after is not None:
            after.carry(before.carried())

    @property
    def outer_step(self) -> OuterStep | None:
        """The mixing; None before the ranks have met, or without other ranks."""
        assert self._mixing is None or isinstance(self._mixing, OuterStep)
        return self._mixing

    def after_step(self) -> None:
        super().after_step()
        assert self._arena is not None and self.outer_step is not None
        if self.outer_step.pending and self.steps % self.algorithm.every >= self.algorithm.overlap:
            self._arena.adopt()
            self.outer_step.apply()
            self._arena.give_back()

    def _mix(self) -> None:
        super()._mix()
        if self.buffers and (self.round + 1) % self.algorithm.fragments == 0:
            take_mean([buffer for _, buffer in self.buffers], "diloco.buffers", self.settings.process_set)
