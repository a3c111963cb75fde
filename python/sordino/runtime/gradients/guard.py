"""Guards of tensors whose values are not final yet. A use of such a tensor in any thread first calls a function.

A guarded tensor has a special class, which sees every torch call that Python makes with it. A call of a module with
guarded parameters is seen, too (`before_call`), because the module may use them outside of Python. The guard does not
see uses of references to the memory that are older than itself; `uses_of` detects such references.
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
"""Functions of tensors that do not use the values."""


class Guard:
    """Guard of some tensors: a function to call before one of them is used.

    Args:
        react: called with the function that uses a tensor. It takes off the guard, or raises.
        values_only: whether functions that do not use values may be called meanwhile.
    """

    def __init__(self, react: Callable[[Any], None], values_only: bool = False) -> None:
        self.react, self.values_only = react, values_only
        self._guarded: list[tuple[torch.Tensor, type[torch.Tensor]]] = []

    def put_on(self, tensors: Iterable[torch.Tensor]) -> None:
        """Begin to guard these tensors."""
        self._guarded = [(tensor, type(tensor)) for tensor in tensors]
        for tensor, cls in self._guarded:
            tensor.__dict__["_guard"] = self
            tensor.__class__ = _guarded_class(cls)
        _in_place.add(self)

    def take_off(self) -> None:
        """Stop guarding the tensors."""
        _in_place.discard(self)
        for tensor, cls in self._guarded:
            tensor.__class__ = cls
            del tensor.__dict__["_guard"]
        self._guarded = []


_in_place: weakref.WeakSet[Guard] = weakref.WeakSet()


class _Guarded:
    """Base class of a tensor while it is guarded."""

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

    # Copies and pickles have the class and attributes of the tensor, so the guard must be taken off first.
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
    guard = tensor.__dict__.get("_guard")  # another thread may have taken it off meanwhile
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
    """Call the guards of a module's own parameters, or of all its parameters if it may compute outside of Python."""
    if _in_place:
        for parameter in module.parameters() if _is_opaque(module) else module._parameters.values():
            if isinstance(parameter, _Guarded):
                _react(parameter, type(module).__call__)


def _is_opaque(module: torch.nn.Module) -> bool:
    """Return whether a call of a module may bypass its Python forward, perhaps depending on the parameters' classes."""
    return (
        not module.training  # as `torch.nn.MultiheadAttention` does in evaluation
        or isinstance(module, torch.jit.ScriptModule)
        or module._compiled_call_impl is not None
        or hasattr(module.forward, "_torchdynamo_orig_callable")
    )


def uses_of(tensor: torch.Tensor) -> int:
    """Return the number of references to a tensor's memory, including views in NumPy and DLPack."""
    with torch._C.DisableTorchFunction():
        return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))
