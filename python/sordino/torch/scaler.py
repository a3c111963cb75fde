"""Steps that `torch.amp.GradScaler` requests.

Gradients are unscaled here. If they are infinite, all ranks that share them skip the step. Algorithms that exchange
parameters still do their exchange.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sordino.algorithms.strategy import Strategy
from sordino.errors import UsageError
from sordino.runtime.local_shards import LocalShard
from sordino.runtime.tensors import stored_values
from sordino.torch.arguments import parameters_of

_CHECKED = (
    "check_finite=True cannot be combined with GradScaler: a scaler tries scales until gradients are infinite, and "
    "skips such steps on all ranks by itself"
)

_SHARDED = (
    "GradScaler cannot be used with parameters that are sharded over a device mesh (mesh=): ranks with different "
    "shards would skip different steps. Train in bfloat16, which needs no scaler"
)


def unscales() -> bool:
    """Return whether the property that calls this function is being read by a GradScaler that unscales gradients.

    Other code may read it on one rank only. A GradScaler reads it in the same step on all ranks, so the gradients can
    be reduced first.
    """
    return sys._getframe(2).f_code.co_name == "_unscale_grads_"


@contextmanager
def _leaving_nothing(asked: Any) -> Iterator[None]:
    """If the block raises, remove the attributes that a scaler has set. It removes them itself after a success only."""
    try:
        yield
    except BaseException:
        for name in ("found_inf", "grad_scale"):
            asked.__dict__.pop(name, None)
        raise


def step_scaled(
    asked: Any,
    strategy: Strategy,
    optimizer: torch.optim.Optimizer,
    closure: Callable[[], Any] | None,
    synchronize: bool,
    check_finite: bool,
) -> Any:
    """Take the step that a GradScaler requests, or skip it if gradients are infinite.

    Args:
        asked: the optimizer that the scaler knows. The scaler has set its `found_inf` and `grad_scale`.
        strategy: strategy of the steps.
        optimizer: the wrapped optimizer, which takes the steps.
        closure: as in `step()`.
        synchronize: whether gradients that are not reduced yet are reduced first.
        check_finite: whether `step()` refuses gradients with NaN or Inf; a scaler cannot be used then.

    Raises:
        UsageError: the scaler cannot be used.
    """
    with _leaving_nothing(asked):
        found, scale = asked.__dict__.get("found_inf"), asked.__dict__.get("grad_scale")
        problem = _CHECKED if check_finite else strategy.scaler_problem()
        if any(isinstance(parameter, LocalShard) for parameter in strategy.parameters):
            problem = _SHARDED
        if problem is not None:
            raise UsageError(problem)
        if found is None:
            return strategy.step(optimizer, closure, synchronize)
        strategy.begin(optimizer)
        gradients = [p.grad for p in parameters_of(optimizer) if p.grad is not None]
        infinite = float(found) > 0  # torch gives the number 0 if no parameter has a gradient
        if strategy.reducer is not None and strategy.reducer.active:
            # Members of a group must decide alike, so they decide by the reduced gradients, which all have.
            strategy.synchronize()
            gradients = [p.grad for p in parameters_of(optimizer) if p.grad is not None]
            infinite = not all(bool(stored_values(gradient).isfinite().all()) for gradient in gradients)
        if infinite:
            strategy.leave_out()
            return None
        if scale is not None and gradients:
            torch._foreach_div_(gradients, scale.item())
        return strategy.step_begun(optimizer, closure, synchronize)
