"""Gradients that nobody may use yet.

While they are being averaged somewhere else than in place, `.grad` is a stand-in with the same memory that raises
whatever is done with it.

Only Python is kept out: autograd may go on adding to the memory below.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sordino.errors import StepOrderError

# What zero_grad(set_to_none=False) of a module does, which is well once the gradient has been used.
_CLEARING = ("zero_", "detach_", "requires_grad_", "__get__")


class PendingGradient(torch.Tensor):
    """A gradient that raises when it is used."""

    of_parameter: str
    is_used: bool  # by step() already, so that it may be cleared

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = _first_pending((args, kwargs))
        called = getattr(func, "__name__", str(func))
        if found is None or (found.is_used and called in _CLEARING):
            return super().__torch_function__(func, types, args, kwargs or {})
        why = "was averaged in parts, of which this rank has its own" if found.is_used else "is being averaged"
        raise StepOrderError(
            f"the gradient of '{found.of_parameter}' {why}: {called}() would use what this rank had alone. To clip "
            "gradients, call optimizer.clip_grad_norm_() before step(); to read, unscale or change them, call "
            "optimizer.synchronize(), and then step() within optimizer.skip_synchronize()"
        )


def _first_pending(value: Any) -> PendingGradient | None:
    if isinstance(value, PendingGradient):
        return value
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (list, tuple)):
        return next((found for one in value if (found := _first_pending(one)) is not None), None)
    return None


class PendingGradients:
    """Which of the gradients of `parameters` nobody may use.

    Args:
        names: of the parameters.
    """

    def __init__(self, names: Sequence[str], parameters: Sequence[torch.Tensor]) -> None:
        self._names, self._parameters = names, parameters
        self._hidden: dict[int, tuple[PendingGradient, torch.Tensor]] = {}

    def __bool__(self) -> bool:
        return bool(self._hidden)

    def hide(self, used: bool = False) -> None:
        """Put stand-ins in the place of all gradients.

        Args:
            used: a step has used them; they may be cleared.
        """
        for index, parameter in enumerate(self._parameters):
            gradient = parameter.grad
            if gradient is None or isinstance(gradient, PendingGradient):
                continue
            stand_in: PendingGradient = torch.Tensor._make_subclass(PendingGradient, gradient)
            stand_in.of_parameter, stand_in.is_used = self._names[index], used
            parameter.grad = stand_in
            self._hidden[index] = stand_in, gradient

    def show(self) -> list[str]:
        """Put the gradients back; return the names of those that were replaced or taken away before they were used."""
        hidden, self._hidden = self._hidden, {}
        replaced = []
        for index, (stand_in, gradient) in hidden.items():
            parameter = self._parameters[index]
            if parameter.grad is stand_in:
                parameter.grad = gradient
            elif not stand_in.is_used:
                replaced.append(self._names[index])
        return replaced
