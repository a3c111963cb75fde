"""Shared memory for gradients that persist from step to step. Each has a place: its part of an arena of the node.

A gradient that is elsewhere is moved to its place. `.grad` is a view of the place then.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch

from sordino._core import Layout, Request
from sordino.runtime.context import Context
from sordino.runtime.exchange.flat_buffer import FlatBuffer
from sordino.runtime.tensors import Described, describe, dtype_code

Spec = tuple[str, int, tuple[int, ...]]  # name, code of the dtype, shape

WHOLE = 1 << 62  # bucket size in bytes of a layout that is not divided

_count, _sharers = sys.getrefcount, torch._C._storage_Use_Count


def spec_of(name: str, tensor: torch.Tensor) -> Spec:
    """Return the specification of a tensor."""
    return name, dtype_code(tensor), tuple(tensor.shape)


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
        # Reference counts of each view, of its storage, and of that memory, when only this object refers to them.
        stores = self._storages
        self._counts_when_unused = [
            (_count(views[k]), _count(stores[k]), _sharers(stores[k]._cdata)) for k in range(len(views))
        ]

    def has_some(self) -> bool:
        """Return whether some member's gradient is in its place."""
        return any(self._parameters[i].grad is view for i, view in zip(self._members, self.views))

    @torch.no_grad()
    def take(self, persist: Callable[[], bool]) -> list[int] | None:
        """Move gradients to their places, unless all are elsewhere and do not `persist()` from the last reduction.

        Returns:
            the members without a gradient, whose places are zero now; None if nothing was moved.

        Raises:
            Unfit: a gradient does not fit its place; nothing was moved.
        """
        moving: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []  # parameter, its gradient and the place
        none: list[int] = []
        views, stores = self.views, self._storages
        for k, i in enumerate(self._members):
            gradient = self._parameters[i].grad
            if gradient is views[k]:
                continue
            tensor = self._parameters[i] if gradient is None else gradient
            # A sparse gradient must become sparse again, so it has no place.
            if tensor.is_sparse or tensor.shape != views[k].shape or tensor.dtype != views[k].dtype:
                raise Unfit
            if (_count(views[k]), _count(stores[k]), _sharers(stores[k]._cdata)) != self._counts_when_unused[k]:
                raise Unfit  # an object still refers to an earlier gradient there
            if gradient is None:
                none.append(k)
            else:
                moving.append((self._parameters[i], gradient, views[k]))
        if len(moving) + len(none) == len(views) and not persist():
            return None
        # A cast of the model gives `.grad` other memory, although it stays the same object.
        if list(map(torch.Tensor.data_ptr, views)) != self._addresses:
            raise Unfit
        for k in none:
            views[k].zero_()
        for parameter, gradient, view in moving:
            parameter.grad = view.copy_(gradient)
        return none
