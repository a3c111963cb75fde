"""Shared memory for gradients that persist from step to step. Each has a place: its part of an arena of the node.

A gradient that is elsewhere is moved to its place; then `.grad` is a view of the place. A gradient that another object
refers to, such as the script's flat buffer of all gradients, stays where it is, because the script may clear or read it
there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache

import torch

from sordino._core import Layout, Request
from sordino.runtime.context import Context
from sordino.runtime.devices import HOST
from sordino.runtime.exchange.flat_buffer import FlatBuffer
from sordino.runtime.gradients.guard import uses_of
from sordino.runtime.tensors import Described, describe, dtype_code

Spec = tuple[str, int, tuple[int, ...]]  # name, code of the dtype, shape

WHOLE = 1 << 62  # bucket size in bytes of a layout that is not divided

_count, _sharers = sys.getrefcount, torch._C._storage_Use_Count


def spec_of(name: str, tensor: torch.Tensor) -> Spec:
    """Return the specification of a tensor."""
    return name, dtype_code(tensor, name), tuple(tensor.shape)


def is_shared(parameter: torch.Tensor) -> bool:
    """Return whether an object other than the parameter refers to its gradient, or to the gradient's memory."""
    counts, alone = _references(parameter), _references_when_alone()
    return counts[0] > alone[0] or counts[1] > alone[1]


def _references(parameter: torch.Tensor) -> tuple[int, int]:
    gradient = parameter.grad
    assert gradient is not None
    return _count(gradient), uses_of(gradient)


@cache
def _references_when_alone() -> tuple[int, int]:
    with torch.inference_mode(False):
        parameter = torch.zeros(1, dtype=torch.float32, device=HOST, requires_grad=True)
        parameter.grad = torch.zeros(1, dtype=torch.float32, device=HOST)
    return _references(parameter)


class Unfit(Exception):
    """A gradient cannot be moved: it does not fit its place, or the place is in use."""


class Places:
    """Places of a bucket's gradients and flags.

    Args:
        context: the context of this rank.
        name: name of the bucket.
        specs: specifications of its members.
        members: indices of its members in `parameters`.
        parameters: all parameters.
        flags: the bucket's flags, which are copied.

    Raises:
        TransportError: no shared memory is left.
    """

    def __init__(
        self,
        context: Context,
        name: str,
        specs: Sequence[Spec],
        members: Sequence[int],
        parameters: Sequence[torch.Tensor],
        flags: torch.Tensor,
    ) -> None:
        layout = Layout([*specs, spec_of(f"{name}.flags", flags)], WHOLE)
        buffer = FlatBuffer(context, layout, flags.device)
        tensors = [*(parameters[i] for i in members), flags]
        *views, self.flags = (buffer.like(tensor, offset) for tensor, offset in zip(tensors, layout.offsets))
        self.flags.copy_(flags)
        self.views: list[torch.Tensor] = views
        self.described: list[Described] = [describe(tensor, tensor) for tensor in (*views, self.flags)]
        """Descriptions of the places and flags for the core."""
        self.requests: dict[str, Request] = {}
        """Requests that reduce the places, by name. A request never changes."""
        self._members, self._parameters = members, parameters
        self._addresses = list(map(torch.Tensor.data_ptr, views))
        self._storages = [view.untyped_storage() for view in views]
        # Reference counts of each view, of its storage, and of its memory, when only this object refers to them.
        stores = self._storages
        self._counts_when_unused = [
            (_count(views[k]), _count(stores[k]), _sharers(stores[k]._cdata)) for k in range(len(views))
        ]

    def has_some(self) -> bool:
        """Return whether some member's gradient is in its place."""
        return any(self._parameters[i].grad is view for i, view in zip(self._members, self.views))

    @torch.no_grad()
    def take(self, persist: Callable[[], bool]) -> list[int] | None:
        """Move gradients to their places. If all are elsewhere, move them only if `persist()` returns True.

        Returns:
            the members without a gradient, whose places are zero now; None if nothing was moved.

        Raises:
            Unfit: a gradient does not fit its place, or is in use elsewhere; nothing was moved.
        """
        moving: list[tuple[torch.Tensor, torch.Tensor]] = []  # parameters, and the places of their gradients
        none: list[int] = []
        views, stores = self.views, self._storages
        for k, i in enumerate(self._members):
            parameter = self._parameters[i]  # a variable for the gradient or view would count as a reference
            if parameter.grad is views[k]:
                continue
            if not _fits(parameter if parameter.grad is None else parameter.grad, views[k]):
                raise Unfit
            if (_count(views[k]), _count(stores[k]), _sharers(stores[k]._cdata)) != self._counts_when_unused[k]:
                raise Unfit  # an object still refers to an earlier gradient there
            if parameter.grad is None:
                none.append(k)
            else:
                moving.append((parameter, views[k]))
        if len(moving) + len(none) == len(views) and not persist():
            return None
        # A cast of the model changes the memory of `.grad`, but not the object.
        if list(map(torch.Tensor.data_ptr, views)) != self._addresses or any(is_shared(one) for one, _ in moving):
            raise Unfit
        for k in none:
            views[k].zero_()
        for parameter, view in moving:
            assert parameter.grad is not None
            parameter.grad = view.copy_(parameter.grad)
        return none


def _fits(tensor: torch.Tensor, place: torch.Tensor) -> bool:
    """Return whether a gradient can be moved to a place. A sparse gradient cannot: its result must be sparse, too."""
    return not tensor.is_sparse and tensor.shape == place.shape and tensor.dtype == place.dtype
