"""Strategy for Adasum: local steps, then a combination of all ranks' steps (Maleki et al. 2020, section 3)."""

from __future__ import annotations

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
    """

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
        """Step locally, then change every parameter by the Adasum of all ranks' changes of it."""
        self.settings.check.meet(self.context)
        moving = [i for i, p in enumerate(self.parameters) if p.requires_grad]
        parameters = [self.parameters[i] for i in moving]
        before = [p.detach().clone() for p in parameters]
        result = self.settings.guarded(optimizer, self.reset).step(closure)
        packed = [self.settings.compression.compress(p.detach() - start) for p, start in zip(parameters, before)]
        sent = self.settings.look(moving, [change for change, _ in packed])
        changes = grouped_allreduce_([tensor for tensor, _ in packed], op=Adasum, name=self.name)
        with torch.no_grad():
            if self.settings.finite is not None:
                try:
                    self.settings.finite.judge_changes(sent, self.settings.look(moving, changes))
                except NonFinite:
                    torch._foreach_copy_(parameters, before)
                    raise
            for p, start, change, (_, state) in zip(parameters, before, changes, packed):
                p.copy_(start + self.settings.compression.decompress(change, state))
        return result
