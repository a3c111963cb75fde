"""Steps that are taken when somebody looks: until then every torch call of the thread is watched for their parameters.

The watch is a `TorchFunctionMode`, which sees every call with tensors that Python makes, attributes and methods
included. A call of a module that has such parameters completes the step, too: that comes first in a forward pass, also
in one that is compiled, and outside of the mode, which ends there. The mode lies below those of users, who may end
theirs while it lasts.
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
from sordino.runtime.guard import Guard, before_call


class Postponed(Protocol):
    """A step that has not been taken yet."""

    def changes(self, tensor: torch.Tensor) -> bool:
        """Return whether it changes the tensor, or one whose memory that looks at."""

    def complete(self) -> None:
        """Take the step."""


class Watch(TorchFunctionMode):
    """Completes steps when their parameters are touched, in one thread."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[Postponed] = []
        self._entered = False

    def add(self, step: Postponed) -> None:
        """Watch for a step."""
        self.waiting.append(step)
        if self._entered:
            return
        modes = _take_modes()
        # The default device insists on the lowest place: set_default_device() enters it, torch.device() pushes it.
        below = 1 if modes and isinstance(modes[0], DeviceContext) and hasattr(modes[0], "old_device") else 0
        _put_modes([*modes[:below], self, *modes[below:]])
        self._entered = True

    def remove(self, step: Postponed) -> None:
        """Forget a step, and stop watching after the last one."""
        self.waiting = [one for one in self.waiting if one is not step]
        self.leave()

    def leave(self) -> None:
        """Stop watching if there is nothing to watch for.

        Within a call that is being watched it cannot: then the next module that is called does it.
        """
        if self.waiting or not self._entered:
            return
        modes = _take_modes()
        _put_modes([mode for mode in modes if mode is not self])
        self._entered = not any(mode is self for mode in modes)

    def before_forward(self, module: torch.nn.Module) -> None:
        """Do what precedes every call of a module."""
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
    """Empty this thread's stack of modes; the lowest comes first."""
    return [_pop_mode() for _ in range(_len_torch_function_stack())][::-1]


def _put_modes(modes: Iterable[TorchFunctionMode]) -> None:
    for mode in modes:
        _push_mode(mode)


def storage_of(tensor: torch.Tensor) -> int:
    """Name the memory of a tensor, whatever view of it that is; 0 for tensors without any."""
    try:
        with torch._C.DisableTorchFunction():
            return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0


def _refuse(func: Any) -> None:
    raise StepOrderError(
        f"{getattr(func, '__qualname__', func)} uses a parameter whose step is postponed, in another thread than "
        "that of step(): call optimizer.flush() there after step()"
    )


@torch.no_grad()
def hide(tensors: Iterable[torch.Tensor]) -> Callable[[], None]:
    """Fill tensors with NaN and make whoever uses them raise `StepOrderError`; return what undoes that."""
    hidden = [(tensor, tensor.data.clone()) for tensor in tensors]
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
    """Have modules tell, from now on, when they are called.

    One attribute changes, once: a global forward hook would be an entry of a dictionary that other threads may be
    walking through, and stand in the way of compilers.
    """
    torch.nn.Module.__call__ = _watched_call  # type: ignore[method-assign]


class _EndOfThread:
    """Ends the watch of a thread with it: torch cannot let go of modes that are left on a stack then."""

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


# A child has copies of the parameters, and no rank that could complete them.
os.register_at_fork(before=lambda: watch().complete_all())
