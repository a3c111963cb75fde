"""Where gradients lie while they are reduced, and from then on until the next step has its own.

Each member of a bucket has a place in an arena that the ranks of a node share. A gradient that is elsewhere is moved
there as soon as backward has made a piece of them, while it is in the cache; `.grad` is the place then.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from sordino._core import Layout, Request
from sordino.runtime.context import Context
from sordino.runtime.flat_buffer import FlatBuffer
from sordino.runtime.tensors import Described, describe, dtype_code

Spec = tuple[str, int, tuple[int, ...]]  # name, code of the dtype, shape

WHOLE = 1 << 62  # bucket size of a layout that is not to be cut

_count, _sharers = sys.getrefcount, torch._C._storage_Use_Count


class Outgrown(Exception):
    """A gradient cannot be moved to its place: it is another one than this was made for."""


class Occupied(Exception):
    """Somebody looks at what is in a place: at a gradient of an earlier step."""


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

    @torch.no_grad()
    def take(self, first: int, last: int) -> list[int]:
        """Move the gradients of some members to their places; return which have none. Those have zeros in theirs.

        Raises:
            Outgrown, Occupied: nothing was moved.
        """
        into, fresh, moving, none = [], [], [], []
        views, stores = self.views, self._storages
        for k in range(first, last):
            parameter = self._parameters[self._members[k]]
            gradient = parameter.grad
            if gradient is views[k]:
                continue
            tensor = parameter if gradient is None else gradient
            # A sparse gradient is to be sparse again.
            if tensor.is_sparse or tensor.shape != views[k].shape or tensor.dtype != views[k].dtype:
                raise Outgrown
            if (_count(views[k]), _count(stores[k]), _sharers(stores[k]._cdata)) != self._unseen[k]:
                raise Occupied
            if gradient is None:
                none.append(k)
            else:
                moving.append(parameter)
                into.append(views[k])
                fresh.append(gradient)
        # A model that is cast gives `.grad`, which stays the same object, other memory.
        if list(map(torch.Tensor.data_ptr, views)) != self._addresses:
            raise Outgrown
        for k in none:
            views[k].zero_()
        if into:
            torch._foreach_copy_(into, fresh)
        for parameter, view in zip(moving, into):
            parameter.grad = view
        return none
