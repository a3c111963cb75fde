"""A rank's own gradients while they are being reduced, so that it can be repeated without ranks that are lost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch


class OwnGradients:
    """Copies of the gradients of `parameters`, from the time that a reduction of theirs begins until the next cycle."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._values: dict[int, torch.Tensor | None] = {}
        self._room: dict[int, torch.Tensor] = {}  # of copies that are not needed any more

    @torch.no_grad()
    def keep(self, indices: Iterable[int]) -> None:
        """Keeps what these parameters have now, unless something of theirs is kept already."""
        for index in indices:
            if index in self._values:
                continue
            gradient = self._parameters[index].grad
            if gradient is None or gradient.is_sparse:
                self._values[index] = gradient  # a reduction replaces these
                continue
            room = self._room.pop(index, None)
            if room is None or room.shape != gradient.shape or room.dtype != gradient.dtype:
                room = torch.empty_like(gradient)
            self._values[index] = room.copy_(gradient)

    def give_back(self) -> None:
        """Makes them the parameters' gradients again."""
        for index, value in self._values.items():
            self._parameters[index].grad = value
        self._values = {}

    def forget(self) -> None:
        """They have been used, or replaced."""
        self._room.update({index: value for index, value in self._values.items() if value is not None})
        self._values = {}

    def leave_arenas(self) -> None:
        """Moves gradients to memory that no rank of an older world can reach: one that stood still may go on."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.detach().clone()
