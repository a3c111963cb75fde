"""Where gradients lie that persist from step to step: each in its part of an arena that the ranks of a node share.

A gradient that is elsewhere is moved to its place; `.grad` is the place then.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch

from sordino._core import Layout, Request
from sordino.runtime.context import Context
from sordino.runtime.flat_buffer import FlatBuffer
from sordino.runtime.tensors import Described, describe, dtype_code

Spec = tuple[str, int, tuple[int, ...]]  # name, code of the dtype, shape

WHOLE = 1 << 62  # bucket size of a layout that is not to be cut

_count, _sharers = sys.getrefcount, torch._C._storage_Use_Count


class Unfit(Exception):
    """A gradient cannot be moved: it is another one than its place is for, or somebody looks at what is there."""


class Places:
    """The places of a bucket's gradients, and of its flags.

    Args:
        name: of the bucket.
        specs: of its members.
        members: their numbers.
        parameters: all of them.
        flags: what is copied.

    Raises:
        TransportError: there is no such memory.
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
        layout = Layout([*specs, (f"{name}.flags", dtype_code(flags), (len(members),))], WHOLE)
        buffer = FlatBuffer(context, layout, flags.device)
        tensors = [*(parameters[i] for i in members), flags]
        *views, self.flags = (buffer.like(tensor, offset) for tensor, offset in zip(tensors, layout.offsets))
        self.flags.copy_(flags)
        self.views: list[torch.Tensor] = views
        self.requests: dict[str, Request] = {}
        """What reduces that which is here, by name. It never changes."""
        self._members, self._parameters = members, parameters
        self._addresses = list(map(torch.Tensor.data_ptr, views))
        self._storages = [view.untyped_storage() for view in views]
        # How many have a place itself, its memory, and other tensors with that memory, when only this object does.
        stores = self._storages
        self._unseen = [(_count(views[k]), _count(stores[k]), _sharers(stores[k]._cdata)) for k in range(len(views))]

    def described(self) -> list[Described]:
        """Return what the core needs to know of the gradients, and of the flags."""
        return [describe(tensor, tensor) for tensor in (*self.views, self.flags)]

    def has_some(self) -> bool:
        """Return whether some member's gradient is in its place."""
        return any(self._parameters[i].grad is view for i, view in zip(self._members, self.views))

    @torch.no_grad()
    def take(self, are_fresh: Callable[[], bool]) -> list[int] | None:
        """Move gradients to their places, unless all are elsewhere and fresh.

        Returns:
            which members have no gradient, and zeros in their places; None if nothing was moved.

        Raises:
            Unfit: nothing was moved.
        """
        moving: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []  # parameter, its gradient and the place
        none: list[int] = []
        views, stores = self.views, self._storages
        for k, i in enumerate(self._members):
            gradient = self._parameters[i].grad
            if gradient is views[k]:
                continue
            tensor = self._parameters[i] if gradient is None else gradient
            # A sparse gradient is to be sparse again.
            if tensor.is_sparse or tensor.shape != views[k].shape or tensor.dtype != views[k].dtype:
                raise Unfit
            if (_count(views[k]), _count(stores[k]), _sharers(stores[k]._cdata)) != self._unseen[k]:
                raise Unfit  # it has a gradient of an earlier step
            if gradient is None:
                none.append(k)
            else:
                moving.append((self._parameters[i], gradient, views[k]))
        if len(moving) + len(none) == len(views) and are_fresh():
            return None
        # A model that is cast gives `.grad`, which stays the same object, other memory.
        if list(map(torch.Tensor.data_ptr, views)) != self._addresses:
            raise Unfit
        for k in none:
            views[k].zero_()
        for parameter, gradient, view in moving:
            parameter.grad = view.copy_(gradient)
        return none
