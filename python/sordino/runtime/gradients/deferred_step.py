"""Deferred steps: a step is taken when a torch call of its thread first uses one of its parameters.

Each thread has a watch, a `TorchFunctionMode`, which sees every torch call of Python with tensors, including attributes
and methods. A call of a module with such parameters completes the step, too, before the forward pass, compiled or not.
This happens outside of the mode, so the mode can end there.

| `waiting` | `_entered` | state |
|---|---|---|
| empty | False | no deferred step; torch runs as usual |
| steps | True | every torch call completes the steps that change one of its tensors |
| empty | True | `leave` was called within a watched call; the next module call leaves |

On the stack of modes, the watch lies below the user's modes, because they may end before it does.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch._C import _len_torch_function_stack
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils._device import DeviceContext

from sordino.errors import StepOrderError
from sordino.runtime.gradients.guard import Guard, before_call


class Postponed(Protocol):
    """A step that has not been taken yet."""

    def changes(self, tensor: torch.Tensor) -> bool:
        """Return whether the step changes the tensor, or a tensor that shares memory with it."""

    def complete(self) -> None:
        """Take the step."""


class Watch(TorchFunctionMode):
    """Completes the deferred steps of one thread when their parameters are used."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[Postponed] = []
        self._entered = False

    def add(self, step: Postponed) -> None:
        """Add a step to complete when its parameters are used."""
        self.waiting.append(step)
        if self._entered:
            return
        modes = _take_modes()
        # The mode of set_default_device() must stay the lowest. torch.device() as a context has no old_device.
        below = 1 if modes and isinstance(modes[0], DeviceContext) and hasattr(modes[0], "old_device") else 0
        _put_modes([*modes[:below], self, *modes[below:]])
        self._entered = True

    def remove(self, step: Postponed) -> None:
        """Remove a step. After the last one, stop watching."""
        self.waiting = [one for one in self.waiting if one is not step]
        self.leave()

    def leave(self) -> None:
        """Stop watching if no step is waiting.

        Within a watched call this is impossible. Then the next call of a module does it.
        """
        if self.waiting or not self._entered:
            return
        modes = _take_modes()
        _put_modes([mode for mode in modes if mode is not self])
        self._entered = not any(mode is self for mode in modes)

    def before_forward(self, module: torch.nn.Module) -> None:
        """Complete the steps that change parameters of a module that is about to be called."""
        if self._entered:
            self._look(module.parameters())
            self.leave()

    def _look(self, values: Iterable[Any]) -> None:
        for value in values:
            if not self.waiting:
                return
            if isinstance(value, torch.Tensor):
                for step in [one for one in self.waiting if one.changes(value)]:
                    step.complete()
            elif isinstance(value, (list, tuple)):
                self._look(value)

    def complete_all(self) -> None:
        """Take all steps."""
        for step in list(self.waiting):
            step.complete()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.waiting:
            self._look(args)
            self._look(kwargs.values())
        return func(*args, **kwargs)


def _take_modes() -> list[TorchFunctionMode]:
    """Empty this thread's stack of modes, and return them, the lowest first."""
    return [_pop_mode() for _ in range(_len_torch_function_stack())][::-1]


def _put_modes(modes: Iterable[TorchFunctionMode]) -> None:
    for mode in modes:
        _push_mode(mode)


def storage_of(tensor: torch.Tensor) -> int:
    """Return an identifier of a tensor's storage, the same for all its views; 0 for a tensor without storage."""
    try:
        with torch._C.DisableTorchFunction():
            return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0


def _refuse(func: Any) -> None:
    raise StepOrderError(
        f"{getattr(func, '__qualname__', func)} uses a parameter whose step is postponed, in another thread than "
        "step(): call optimizer.flush() in the thread of step(), after step()"
    )


@torch.no_grad()
def hide(tensors: Iterable[torch.Tensor]) -> Callable[[], None]:
    """Fill tensors with NaN and make every use of them raise `StepOrderError`. Return a function that undoes both.

    Tensors of integers stay as they are: no step changes them.
    """
    hidden = [(tensor, tensor.data.clone()) for tensor in tensors if tensor.is_floating_point()]
    for tensor, _ in hidden:
        tensor.data.fill_(torch.nan)
    guard = Guard(_refuse)
    guard.put_on(tensor for tensor, _ in hidden)

    def show() -> None:
        guard.take_off()
        for tensor, values in hidden:
            tensor.data.copy_(values)

    return show


_plain_call = torch.nn.Module.__call__


def _watched_call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    if not torch.compiler.is_compiling():
        watch().before_forward(module)
        before_call(module)
    return _plain_call(module, *args, **kwargs)


def watch_modules() -> None:
    """Call the watch and guards before every call of a module, from now on. Idempotent.

    This sets one attribute once. A global forward hook would change a dictionary while other threads may iterate over
    it, and would hinder compilers.
    """
    torch.nn.Module.__call__ = _watched_call  # type: ignore[method-assign]


class _EndOfThread:
    """Ends the watch when its thread ends, because torch cannot release modes that are still on the stack then."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def __del__(self, at_exit: Callable[[], bool] = sys.is_finalizing) -> None:
        if not at_exit():
            try:
                self._watch.complete_all()
            finally:
                self._watch.waiting.clear()
                self._watch.leave()


_local = threading.local()


def watch() -> Watch:
    """Return this thread's watch."""
    if not hasattr(_local, "watch"):
        _local.watch = Watch()
        _local.end = _EndOfThread(_local.watch)
    found: Watch = _local.watch
    return found


# A forked child has copies of the parameters, but is not a rank, so it cannot complete their steps.
os.register_at_fork(before=lambda: watch().complete_all())
