"""Copies of a rank's own gradients during their reduction, so that it can be repeated after a loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from sordino.runtime.context import Context
from sordino.runtime.loss_state import Lockstep
from sordino.runtime.process_set import ProcessSet
from sordino.runtime.recovery.losses import together


class OwnGradients:
    """Copies of the gradients of `parameters`, from the start of their reduction until its end.

    Args:
        context: the context of this rank.
        process_set: ranks that take their steps together, although they may reduce in groups.
        parameters: the parameters.
    """

    def __init__(self, context: Context, process_set: ProcessSet, parameters: Sequence[torch.Tensor]) -> None:
        self._context, self._process_set = context, process_set
        self._parameters = parameters
        self._lockstep: Lockstep | None = None
        self._values: dict[int, torch.Tensor | None] = {}
        self._room: dict[int, torch.Tensor] = {}  # unused memory for copies, by parameter

    @property
    def take_part(self) -> bool:
        """Whether this rank takes steps together with others."""
        return self._context.size > 1 and bool(self._process_set.included())

    def reduce(self, work: Callable[[], None]) -> None:
        """Call `work()`, which reduces all gradients, and repeat it after a loss. Collective."""
        if self._lockstep is None:
            name = self._context.names.plan("gradients.lockstep", self._process_set.process_set_id)
            self._lockstep = self._context.lockstep(name, self._process_set)
        try:
            together(self._context, self._process_set, work, self.give_back, self._lockstep)
        finally:
            self.forget()

    @torch.no_grad()
    def keep(self, indices: Iterable[int]) -> None:
        """Copy the gradients of these parameters, except those that have been copied already."""
        for index in indices:
            if index in self._values:
                continue
            gradient = self._parameters[index].grad
            if gradient is None or gradient.is_sparse:
                self._values[index] = gradient  # a reduction replaces these, so no copy is needed
                continue
            room = self._room.pop(index, None)
            if room is None or room.shape != gradient.shape or room.dtype != gradient.dtype:
                room = torch.empty_like(gradient)
            self._values[index] = room.copy_(gradient)

    def give_back(self) -> None:
        """Restore the gradients from the copies."""
        for index, value in self._values.items():
            self._parameters[index].grad = value
        self._values = {}

    def forget(self) -> None:
        """Drop the copies. The gradients have been used or replaced."""
        self._room.update({index: value for index, value in self._values.items() if value is not None})
        self._values = {}

    def release(self) -> None:
        """Release the copies and their memory."""
        self.forget()
        self._room = {}

    def leave_world(self) -> None:
        """Restore gradients whose reduction a loss has interrupted, and move all gradients to new memory.

        So a stopped rank of an older world cannot write to them when it continues.
        """
        if self._lockstep is None or self._lockstep.received_part == self._lockstep.committed_part:
            self.give_back()
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.detach().clone()
