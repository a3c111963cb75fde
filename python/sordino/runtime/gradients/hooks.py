"""Hooks that detect complete gradients.

Hooks in C++ count the backward passes that have added to each gradient, and call Python when all gradients of a bucket
are complete (GradientCounter). The post hook of a parameter's AccumulateGrad node counts, as in DDP. Hooks of the
tensor run before it, so their changes of a gradient are reduced, too. A DTensor has one hook (local_shards.py). At the
end of a backward that has completed a gradient, all gradients must have the values that `step()` will use.
"""

from __future__ import annotations

import functools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from sordino._core import GradientCounter
from sordino.errors import StepOrderError, UsageError
from sordino.runtime.local_shards import LocalShard, ShardHooks


class ParameterHooks:
    """Hooks of one parameter.

    Args:
        parameter: a leaf that requires a gradient.
        noted: called by the tensor when a gradient has been added.
        counted: called by the parameter's AccumulateGrad node, after all hooks of the tensor.
    """

    def __init__(self, parameter: torch.Tensor, noted: Callable[..., None], counted: Callable[..., None]) -> None:
        self._counted = counted
        self._of_tensor = parameter.register_post_accumulate_grad_hook(noted)
        self._hook_node(parameter)

    def _hook_node(self, parameter: torch.Tensor) -> None:
        # Torch keeps only weak references to nodes. Without this reference it would make a new node without the hook.
        with torch.inference_mode(False), torch.enable_grad():
            self._node = get_gradient_edge(parameter).node
        self._of_node = self._node.register_hook(self._counted)

    def follow(self, parameter: torch.Tensor) -> None:
        """Move the hook to the parameter's current node, after a cast has replaced the node."""
        self._of_node.remove()
        self._hook_node(parameter)

    def remove(self) -> None:
        self._of_tensor.remove()
        self._of_node.remove()


def _remove_all(hooked: dict[int, ParameterHooks | ShardHooks]) -> None:
    while hooked:
        hooked.popitem()[1].remove()


def _tell(watcher: weakref.ref[GradientHooks], method: str, number: int) -> None:
    alive = watcher()
    if alive is not None:
        getattr(alive, method)(number)


@functools.cache
def _untraced_tell() -> Callable[[weakref.ref[GradientHooks], str, int], None]:
    """Return `_tell` in a form that Dynamo does not trace, for compiled autograd.

    It is created on first use, because `torch.compiler.disable` loads Dynamo. Every torch optimizer loads it, too.
    """
    untraced: Callable[[weakref.ref[GradientHooks], str, int], None] = torch.compiler.disable(_tell)
    return untraced


class GradientHooks(ABC):
    """Watches the gradients of `parameters`. A cycle is the time from one step to the next.

    Args:
        names: names of the parameters, for errors.
        parameters: the parameters.
        passes: number of backward passes after which a gradient is complete.
    """

    def __init__(self, names: Sequence[str], parameters: Sequence[torch.Tensor], passes: int) -> None:
        self.names, self.parameters = list(names), list(parameters)
        self.passes = passes
        self._counter = GradientCounter(
            len(self.parameters),
            passes,
            torch._C._current_graph_task_id,
            functools.partial(_untraced_tell(), weakref.ref(self)),
        )
        self.touched = False
        """Whether backward or a reduction has begun in this cycle."""
        self._has_end = True  # whether the current backward calls callbacks at its end
        self._has_shards = any(isinstance(parameter, LocalShard) for parameter in self.parameters)
        self._hooked: dict[int, ParameterHooks | ShardHooks] = {}
        weakref.finalize(self, _remove_all, self._hooked)
        self.backwards: dict[int, weakref.ref[Callable[[], None]]] = {}
        """Current backward passes, by autograd's numbers, and the callbacks that autograd calls at their ends. Autograd
        releases a callback when an exception ends the backward."""

    @property
    def accumulates(self) -> bool:
        """Whether backward passes only add to gradients, without being counted."""
        return self._counter.accumulates

    @accumulates.setter
    def accumulates(self, accumulates: bool) -> None:
        self._counter.accumulates = accumulates

    @property
    def done(self) -> bool:
        """Whether this cycle's gradients are reduced already."""
        return self._counter.done

    @property
    def cut_off(self) -> bool:
        """Whether an exception has ended a backward of this cycle."""
        return any(end() is None for end in self.backwards.values())

    def release(self) -> None:
        """Remove all hooks from the parameters."""
        _remove_all(self._hooked)

    @abstractmethod
    def completed(self, number: int) -> None:
        """Handle the completion, during backward, of all gradients in the counter's set with this number."""

    @abstractmethod
    def _backward_ended(self) -> None:
        """Handle the end of a backward that has completed gradients. The backward returns after this."""

    @abstractmethod
    def _begin_again(self, index: int) -> None:
        """Handle a backward that adds to a gradient which this cycle has reduced and no step has used."""

    def _watch_new(self) -> list[int]:
        """Register hooks of trainable parameters without hooks, such as unfrozen ones. Return their indices."""
        found: list[int] = []
        counter = self._counter
        for index, parameter in enumerate(self.parameters):
            if index not in self._hooked and parameter.requires_grad:
                of_counter = counter.note_hook(index), counter.count_hook(index)
                if isinstance(parameter, LocalShard):
                    self._hooked[index] = ShardHooks(parameter, *of_counter)
                else:
                    self._hooked[index] = ParameterHooks(parameter, *of_counter)
                found.append(index)
        return found

    def backward_adds(self, index: int) -> None:
        """Handle the first gradient of a backward, or a gradient that comes after a reduction in this cycle."""
        if torch.is_grad_enabled() and not self._counter.accumulates:
            raise UsageError(
                f"backward(create_graph=True) has computed the gradient of '{self.names[index]}': gradients are "
                "averaged over ranks, but their derivatives would be those of this rank alone. Compute gradients that "
                "are to be differentiated by torch.autograd.grad(..., create_graph=True), and call backward() without "
                "create_graph on the loss that contains them; or call this backward() in optimizer.no_sync()"
            )
        if self.backwards and self.cut_off:
            self._begin_after_cut_off()
        if self._counter.done:
            self._begin_again(index)
            self.begin_cycle()
        self.touched = True
        if not self._counter.accumulates:
            # Compiled autograd evaluates no nodes, and does not call callbacks at the end. FSDP2 sets gradients outside
            # of nodes, too, but its backward calls them.
            self._has_end = self._has_shards or torch._C._current_autograd_node() is not None
            if self._has_end:
                self._watch_end(torch._C._current_graph_task_id(), last=not self._has_shards)

    def _begin_after_cut_off(self) -> None:
        """Begin a new cycle after an exception has ended a backward. Raises StepOrderError if it sent gradients."""
        self._forget_cut_off()
        self.begin_cycle()

    def _forget_cut_off(self) -> None:
        self.backwards = {number: end for number, end in self.backwards.items() if end() is not None}

    def exceeded(self, index: int) -> None:
        raise StepOrderError(
            "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
            f"backward_passes_per_step to accumulate gradients locally. (parameter '{self.names[index]}')"
        )

    def _watch_end(self, number: int, last: bool = True) -> None:
        """Let autograd call `_ended` at the end of backward `number`, which runs in this thread.

        `last` is False if callbacks that are queued during this backward must run first.
        """
        if number < 0 or number in self.backwards:
            return
        method = "_ended" if last else "_callbacks_begin"
        ended: Callable[[], None] = functools.partial(_tell, weakref.ref(self), method, number)
        self.backwards[number] = weakref.ref(ended)
        torch.autograd.Variable._execution_engine.queue_callback(ended)

    def _callbacks_begin(self, number: int) -> None:
        """Let autograd call `_ended` after the callbacks of this backward, in which FSDP2 sets the last gradients."""
        del self.backwards[number]
        self._watch_end(number)

    def _ended(self, number: int) -> None:
        node = torch._C._current_autograd_node()
        if node is None:
            self.backwards.clear()
            self._counter.forget_streams()
            uncounted = self._counter.uncounted
            if uncounted:
                self._count_rest(uncounted)
            if self._counter.order and not self._counter.done:
                self._backward_ended()
            return

        # This was a backward within another one (a checkpoint's). The end of the outer one counts.
        def outer(*_: Any) -> None:
            hook.remove()
            self._watch_end(torch._C._current_graph_task_id())

        del self.backwards[number]
        hook = node.register_hook(outer)

    def _count_rest(self, uncounted: Iterable[int]) -> None:
        """Count gradients that no node has counted because a cast has replaced the nodes of their parameters."""
        for index in uncounted:
            self._hooked[index].follow(self.parameters[index])
            self._counter.count(index)

    def _has_all(self, but: set[int]) -> bool:
        """Return whether all gradients of backward are complete, except those of the parameters `but`."""
        counter = self._counter
        return bool(counter.order) and counter.has_all([i for i in self._hooked if i not in but])

    def begin_cycle(self) -> None:
        """Begin a new cycle, in which no gradient is complete."""
        self.touched = False
        self._counter.begin_cycle()
