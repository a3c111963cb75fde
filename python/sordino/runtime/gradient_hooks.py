"""Noticing which gradients are complete.

Hooks in C count the backward passes that have added to each, and call Python when those of a bucket are complete
(GradientCounter). The end of a backward in which one has become complete is the time at which all must be what
`step()` will use.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from sordino._core import GradientCounter
from sordino.errors import StepOrderError


class GradientHooks(ABC):
    """Watches the gradients of `parameters`. One cycle is what happens between two steps.

    Args:
        names: of the parameters, for errors.
        passes: after how many backward passes a gradient is complete.
    """

    def __init__(self, names: Sequence[str], parameters: Sequence[torch.Tensor], passes: int) -> None:
        self.names, self.parameters = list(names), list(parameters)
        self.passes = passes
        self._counter = GradientCounter(
            len(self.parameters),
            passes,
            torch._C._current_graph_task_id,
            weakref.ref(self),
        )
        self._touched = False  # something has happened in this cycle
        self._hooked: dict[int, Any] = {}
        self._backwards: set[int] = set()  # under way, by autograd's numbers

    @property
    def accumulates(self) -> bool:
        """Whether backward passes only add to gradients, and are not counted."""
        return self._counter.accumulates

    @accumulates.setter
    def accumulates(self, accumulates: bool) -> None:
        self._counter.accumulates = accumulates

    @property
    def touched(self) -> bool:
        """Whether anything has happened in this cycle."""
        return self._touched

    @property
    def done(self) -> bool:
        """Whether this cycle's gradients are reduced already."""
        return self._counter.done

    def release(self) -> None:
        """Let go of the parameters."""
        for hook in self._hooked.values():
            hook.remove()
        self._hooked = {}

    @abstractmethod
    def completed(self, number: int) -> None:
        """Take note that all gradients are complete that the counter watches under this number, during backward."""

    @abstractmethod
    def _backward_ended(self) -> None:
        """Take note that a backward is over that has completed gradients; it returns after this."""

    @abstractmethod
    def _begin_again(self, index: int) -> None:
        """Take note that a gradient has been added to that was reduced in this cycle, and has not been used."""

    def _watch_new(self) -> list[int]:
        """Register hooks of trainable parameters without one (also of ones that were frozen before); return which."""
        found: list[int] = []
        if len(self._hooked) == len(self.parameters):
            return found
        for index, parameter in enumerate(self.parameters):
            if index not in self._hooked and parameter.requires_grad:
                self._hooked[index] = parameter.register_post_accumulate_grad_hook(self._counter.hook(index))
                found.append(index)
        return found

    def backward_adds(self, index: int) -> None:
        """Take note of a gradient that is the first one of a backward, or comes when gradients were reduced in it."""
        if self._counter.done:
            self._begin_again(index)
            self._begin_cycle()
        self._touched = True
        if not self._counter.accumulates:
            self._watch_end(torch._C._current_graph_task_id())

    def exceeded(self, index: int) -> None:
        raise StepOrderError(
            "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
            f"backward_passes_per_step to accumulate gradients locally. (parameter '{self.names[index]}')"
        )

    def _watch_end(self, number: int) -> None:
        """Have `_ended` called at the end of the backward of this number, which runs in this thread."""
        if number < 0 or number in self._backwards:
            return
        self._backwards.add(number)
        watcher = weakref.ref(self)

        def ended() -> None:
            alive = watcher()
            if alive is not None:
                alive._ended()

        torch.autograd.Variable._execution_engine.queue_callback(ended)

    def _ended(self) -> None:
        node = torch._C._current_autograd_node()
        if node is None:
            self._backwards.clear()
            if self._counter.order and not self._counter.done:
                self._backward_ended()
            return

        # This was a backward within another one (a checkpoint's), whose end counts.
        def outer(*_: Any) -> None:
            hook.remove()
            self._watch_end(torch._C._current_graph_task_id())

        hook = node.register_hook(outer)

    def _has_all(self, but: set[int]) -> bool:
        """Return whether every gradient is complete that backward produces, but for those of some parameters."""
        counter = self._counter
        return bool(counter.order) and counter.has_all([i for i in self._hooked if i not in but])

    def _begin_cycle(self) -> None:
        self._touched = False
        self._counter.begin_cycle()
