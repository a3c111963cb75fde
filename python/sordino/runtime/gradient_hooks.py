"""Noticing which gradients are complete.

Hooks count the backward passes that have added to each, and the end of a backward in which one has become complete is
the time at which all must be what `step()` will use.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

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
        self._order: list[int] = []  # the parameters whose gradients are complete, the first one first
        self._passes = [0] * len(self.parameters)
        self._done = False  # this cycle's gradients are reduced already
        self._touched = False  # something has happened in this cycle
        self._hooked: dict[int, Any] = {}
        self._backwards: set[int] = set()  # under way, by autograd's numbers
        self.accumulates = False
        """Whether backward passes only add to gradients, and are not counted."""

    @property
    def touched(self) -> bool:
        """Whether anything has happened in this cycle."""
        return self._touched

    @property
    def done(self) -> bool:
        """Whether this cycle's gradients are reduced already."""
        return self._done

    def release(self) -> None:
        """Let go of the parameters."""
        for hook in self._hooked.values():
            hook.remove()
        self._hooked = {}

    @abstractmethod
    def _completed(self, index: int) -> None:
        """Take note that the gradient of a parameter is complete. Called during backward."""

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
            if index in self._hooked or not parameter.requires_grad:
                continue
            watcher = weakref.ref(self)

            def fired(_: torch.Tensor, index: int = index, watcher: weakref.ref[GradientHooks] = watcher) -> None:
                alive = watcher()
                if alive is not None:
                    alive._count(index)

            self._hooked[index] = parameter.register_post_accumulate_grad_hook(fired)
            found.append(index)
        return found

    def _count(self, index: int) -> None:
        if self._done:
            self._begin_again(index)
            self._begin_cycle()
        self._touched = True
        if self.accumulates:
            return
        if self._passes[index] >= self.passes:
            raise StepOrderError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
                f"backward_passes_per_step to accumulate gradients locally. (parameter '{self.names[index]}')"
            )
        self._passes[index] += 1
        number = torch._C._current_graph_task_id()
        if number >= 0 and number not in self._backwards:
            self._watch_end(number)
        if self._passes[index] < self.passes:
            return
        self._order.append(index)
        self._completed(index)

    def _watch_end(self, number: int) -> None:
        """Have `_ended` called at the end of the backward of this number, which runs in this thread."""
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
            if max(self._passes) >= self.passes and not self._done:
                self._backward_ended()
            return

        # This was a backward within another one (a checkpoint's), whose end counts.
        def outer(*_: Any) -> None:
            hook.remove()
            number = torch._C._current_graph_task_id()
            if number >= 0 and number not in self._backwards:
                self._watch_end(number)

        hook = node.register_hook(outer)

    def _has_all(self, but: set[int]) -> bool:
        """Return whether every gradient is complete that backward produces, but for those of some parameters."""
        return any(self._passes) and all(self._passes[i] >= self.passes for i in self._hooked if i not in but)

    def _begin_cycle(self) -> None:
        self._done, self._touched, self._order = False, False, []
        self._passes = [0] * len(self.parameters)
