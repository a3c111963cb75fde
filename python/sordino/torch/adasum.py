"""Adasum for optimizers: step on local gradients, then combine all ranks' steps (Maleki et al. 2020, section 3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from sordino.context import Context
from sordino.torch.compression import Compressor
from sordino.torch.operation import Adasum
from sordino.torch.ops import grouped_allreduce_
from sordino.torch.process_sets import global_process_set
from sordino.torch.segments import check_layout, whole_layout


class AdasumSteps:
    """Replaces every rank's change of the parameters by the Adasum of all ranks' changes, tensor by tensor.

    Memory: one copy of the parameters during a step. Sent per step: log2(N) times the bytes of the parameters.
    """

    in_flight = False
    ready = False
    done = False

    def __init__(
        self,
        context: Context,
        names: Sequence[str],
        parameters: Sequence[torch.Tensor],
        compression: type[Compressor],
        compare: bool,
    ) -> None:
        self.parameters = list(parameters)
        self.compression = compression
        layout = whole_layout(names, parameters)
        if compare:
            check_layout(context, layout, global_process_set)
        self.name = context.plan_name(f"adasum.{layout.hash:x}", 0)

    def release(self) -> None:
        """Nothing is hooked."""

    def reset(self) -> None:
        """Nothing is carried from one step to the next."""

    def synchronize(self) -> None:
        """Does nothing: there is nothing to combine before the local step."""

    def step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None, synchronize: bool) -> Any:
        """Steps locally, then moves every parameter by the Adasum of all ranks' changes of it."""
        parameters = [p for p in self.parameters if p.requires_grad]
        before = [p.detach().clone() for p in parameters]
        result = optimizer.step(closure)  # type: ignore[arg-type]
        packed = [self.compression.compress(p.detach() - start) for p, start in zip(parameters, before)]
        changes = grouped_allreduce_([tensor for tensor, _ in packed], op=Adasum, name=self.name)
        with torch.no_grad():
            for p, start, change, (_, state) in zip(parameters, before, changes, packed):
                p.copy_(start + self.compression.decompress(change, state))
        return result
