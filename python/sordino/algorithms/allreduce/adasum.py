"""Strategy for Adasum: local steps, then the Adasum of all ranks' changes (Maleki et al. 2020, section 3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sordino.algorithms.allreduce import AllReduce
from sordino.algorithms.strategy import Closure, Runtime, Strategy
from sordino.errors import NonFinite, UsageError
from sordino.runtime.collectives.operation import Adasum
from sordino.runtime.collectives.ops import grouped_allreduce_
from sordino.runtime.gradients.plan import whole_layout


class AdasumStrategy(Strategy):
    """Strategy that replaces each rank's change of the parameters by the Adasum of all ranks' changes, per tensor.

    Memory: one copy of the parameters during a step. Sent per step: log2(N) times the bytes of the parameters.
    With GradScaler, a rank whose gradients are infinite takes part with changes of 0; ranks have scales of their own.
    """

    steps_always = True

    def __init__(self, runtime: Runtime, algorithm: AllReduce) -> None:
        super().__init__(runtime, algorithm)
        if self.settings.process_set.process_set_id != 0:
            raise UsageError("Adasum does not support process sets")
        if runtime.compare:
            self.settings.check.meet(self.context)
        self.name = self.context.names.plan(f"adasum.{whole_layout(self.names, self.parameters).hash:x}", 0)

    def skip_problem(self) -> str:
        return "Skipping synchronization is not supported when using Adasum optimizer."

    def step(self, optimizer: torch.optim.Optimizer, closure: Closure, synchronize: bool) -> Any:
        """Step locally, then replace the change of every parameter by the Adasum of all ranks' changes."""
        self.settings.check.meet(self.context)
        moving = self._moving()
        before = [parameter.detach().clone() for _, parameter in moving]
        result = self.settings.guarded(optimizer, self.reset).step(closure)
        self._combine(moving, before)
        return result

    def leave_out(self) -> None:
        """Take part, with changes of 0, in the step of the ranks whose gradients are finite."""
        self.settings.check.meet(self.context)
        moving = self._moving()
        self._combine(moving, [parameter.detach().clone() for _, parameter in moving])

    def _moving(self) -> list[tuple[int, torch.Tensor]]:
        return [(i, parameter) for i, parameter in enumerate(self.parameters) if parameter.requires_grad]

    @torch.no_grad()
    def _combine(self, moving: Sequence[tuple[int, torch.Tensor]], before: list[torch.Tensor]) -> None:
        """Replace the parameters' changes since `before` by the Adasum of all ranks' changes. Collective."""
        numbers, parameters = [number for number, _ in moving], [parameter for _, parameter in moving]
        packed = [self.settings.compression.compress(p - start) for p, start in zip(parameters, before)]
        sent = self.settings.look(numbers, [change for change, _ in packed])
        changes = grouped_allreduce_([tensor for tensor, _ in packed], op=Adasum, name=self.name)
        if self.settings.finite is not None:
            try:
                self.settings.finite.judge_changes(sent, self.settings.look(numbers, changes))
            except NonFinite:
                torch._foreach_copy_(parameters, before)
                raise
        for p, start, change, (_, state) in zip(parameters, before, changes, packed):
            p.copy_(start + self.settings.compression.decompress(change, state))
