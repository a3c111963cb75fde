"""Adasum for optimizers: step on local gradients, then combine all ranks' steps (Maleki et al. 2020, section 3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from sordino.context import Context
from sordino.errors import NonFinite
from sordino.torch.operation import Adasum
from sordino.torch.ops import grouped_allreduce_
from sordino.torch.segments import Settings, whole_layout


class AdasumSteps:
    """Replaces every rank's change of the parameters by the Adasum of all ranks' changes, tensor by tensor.

    Memory: one copy of the parameters during a step. Sent per step: log2(N) times the bytes of the parameters.
    """

    in_flight = False
    ready = False
    done = False
    final = True  # a rank's step uses its own gradients
    accumulates = False

    def __init__(
        self,
        context: Context,
        names: Sequence[str],
        parameters: Sequence[torch.Tensor],
        settings: Settings,
        compare: bool,
    ) -> None:
        self.context = context
        self.parameters = list(parameters)
        self.settings = settings
        if compare:
            settings.agreement.meet(context)
        self.name = context.plan_name(f"adasum.{whole_layout(names, parameters).hash:x}", 0)

    def release(self) -> None:
        """Nothing is hooked."""

    def reset(self) -> None:
        """Nothing is carried from one step to the next."""

    def synchronize(self) -> None:
        """Does nothing: there is nothing to combine before the local step."""

    def clip(self, limit: float, kind: float, strict: bool) -> torch.Tensor:
        """Scales this rank's gradients so that their norm is at most `limit`; the norm before."""
        return torch.nn.utils.clip_grad_norm_(self.parameters, limit, kind, strict)

    def step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None, synchronize: bool) -> Any:
        """Steps locally, then moves every parameter by the Adasum of all ranks' changes of it."""
        self.settings.agreement.meet(self.context)
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
