"""Tensors that are not yet what they are to be: whoever uses one, in whatever thread, has that seen to first.

While tensors are guarded they are of a class of their own, which sees every call of torch that Python makes with them.
So do modules whose parameters they are (`before_call`), for what those do may be out of Python's sight. Memory that was
taken out before can be read unseen; `uses_of` tells that somebody has it.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import torch

_gradient: Any = torch.Tensor.grad
_OF_NO_VALUES = frozenset(
    [_gradient.__set__, _gradient.__delete__]
    + [getattr(torch.Tensor, name).__get__ for name in ("grad", "requires_grad", "shape", "dtype", "device", "is_leaf")]
)
"""What asks a tensor for something else than its values."""


class Guard:
    """What is to be done before any of some tensors is used.

    Args:
        react: called with what uses one. When it returns, the guard is taken off; else it raises.
        values_only: whether what asks for no values may be called meanwhile.
    """

    def __init__(self, react: Callable[[Any], None], values_only: bool = False) -> None:
        self.react, self.values_only = react, values_only
        self._guarded: list[tuple[torch.Tensor, type[torch.Tensor]]] = []

    def put_on(self, tensors: Iterable[torch.Tensor]) -> None:
        """Guard these tensors from now on."""
        self._guarded = [(tensor, type(tensor)) for tensor in tensors]
        for tensor, cls in self._guarded:
            tensor.__dict__["_guard"] = self
            tensor.__class__ = _guarded_class(cls)
        _in_place.add(self)

    def take_off(self) -> None:
        """Let all tensors be used again."""
        _in_place.discard(self)
        for tensor, cls in self._guarded:
            tensor.__class__ = cls
            del tensor.__dict__["_guard"]
        self._guarded = []


_in_place: weakref.WeakSet[Guard] = weakref.WeakSet()


class _Guarded:
    """What a tensor is while it is guarded."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        harmless = func in _OF_NO_VALUES
        for tensor in _guarded_in((args, tuple(kwargs.values()))):
            _react(tensor, func, harmless)
        if harmless:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    # Copies and pickles are of the class that this is, and have what it has: it must be used before.
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _use(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _use(self)
        return self.__reduce_ex__(protocol)


@torch.no_grad()
def _use(tensor: Any) -> None:
    torch.Tensor.detach(tensor)


def _react(tensor: Any, func: Any, harmless: bool = False) -> None:
    guard = tensor.__dict__.get("_guard")  # which another thread may have taken off meanwhile
    if guard is not None and not (harmless and guard.values_only):
        guard.react(func)


@cache
def _guarded_class(cls: type[torch.Tensor]) -> type[torch.Tensor]:
    return type(f"Guarded{cls.__name__}", (_Guarded, cls), {})


def _guarded_in(value: Any) -> Iterator[_Guarded]:
    if isinstance(value, _Guarded):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _guarded_in(one)


def before_call(module: torch.nn.Module) -> None:
    """See to what a module uses that is about to be called: its own parameters, or all if Python does not see it."""
    if _in_place:
        for parameter in module.parameters() if _is_opaque(module) else module._parameters.values():
            if isinstance(parameter, _Guarded):
                _react(parameter, type(module).__call__)


def _is_opaque(module: torch.nn.Module) -> bool:
    """Return whether other functions may be called for a module than its forward says, by the classes of parameters."""
    return (
        not module.training  # as `torch.nn.MultiheadAttention` does in evaluation
        or isinstance(module, torch.jit.ScriptModule)
        or module._compiled_call_impl is not None
        or hasattr(module.forward, "_torchdynamo_orig_callable")
    )


def uses_of(tensor: torch.Tensor) -> int:
    """Return a number that grows with every view of a tensor's memory, also of NumPy's and DLPack's."""
    with torch._C.DisableTorchFunction():
        return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))
