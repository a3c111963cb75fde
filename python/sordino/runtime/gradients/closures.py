"""Closures: gradients are reduced after each evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from sordino.runtime.collectives.autograd import allreduce
from sordino.runtime.collectives.operation import Average, Sum
from sordino.runtime.devices import HOST

if TYPE_CHECKING:
    from sordino.runtime.gradients.reducer import GradientReducer


def reducing(reducer: GradientReducer, closure: Callable[[], Any], synchronize: bool) -> Callable[[], Any]:
    """Return a closure that evaluates `closure` and then, if `synchronize`, reduces the gradients.

    An optimizer that evaluates it several times (a line search) may base decisions on the loss, and all ranks must
    decide the same. So the losses are reduced, too, unless the optimizer is known to evaluate a closure once.
    """

    def evaluate() -> Any:
        if reducer.done:
            reducer.begin_cycle()
        loss = closure()
        if synchronize:
            reducer.synchronize()
        return loss if reducer.settings.evaluates_once else _loss_of_all(reducer, loss)

    return evaluate


def _loss_of_all(reducer: GradientReducer, loss: Any) -> Any:
    """Return the loss of a closure, summed or averaged over the ranks like gradients."""
    if loss is None or not reducer.active:
        return loss
    settings = reducer.settings
    op = Sum if settings.op == Sum else Average
    mine = loss.detach() if isinstance(loss, torch.Tensor) else torch.tensor(loss, dtype=torch.float64, device=HOST)
    whole = allreduce(mine, op=op, name=f"{reducer.plan}.loss", process_set=settings.process_set)
    return whole if isinstance(loss, torch.Tensor) else whole.item()
