"""What the reduction of gradients is made of: its settings, its buckets, and the layout of what is reduced."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sordino._core import Device, Handle, Layout, Request
from sordino.runtime.agreement import Agreement
from sordino.runtime.compression import Compression, Compressor
from sordino.runtime.context import Context
from sordino.runtime.flat_buffer import FlatBuffer
from sordino.runtime.nonfinite import Evidence, FiniteCheck
from sordino.runtime.process_set import ProcessSet
from sordino.runtime.tensors import Described, describe, dtype_code, label

Spec = tuple[str, int, tuple[int, ...]]

WHOLE = 1 << 62  # bucket size of a layout that is not to be cut


@dataclass(frozen=True)
class Settings:
    """How gradients are reduced.

    The fields are the arguments of `DistributedOptimizer`, and what the ranks that it is used on must have in common.
    """

    op: int
    process_set: ProcessSet
    bucket_bytes: int
    agreement: Agreement
    compression: type[Compressor] = Compression.none
    passes: int = 1
    predivide: float = 1.0
    sparse_as_dense: bool = False
    groups: tuple[tuple[int, ...], ...] = ()  # parameter indices that the user wants reduced together
    finite: FiniteCheck | None = None
    members: tuple[int, ...] = ()  # of the process set when the algorithm was chosen, by their first ranks

    def look(self, members: Sequence[int], gradients: Sequence[torch.Tensor]) -> Evidence | None:
        """Return, with check_finite, which of these, that are about to be sent, are not finite."""
        return None if self.finite is None else Evidence(members, gradients)

    def judge(self, names: Sequence[str], tensors: Sequence[torch.Tensor], together: bool = False) -> None:
        """Judge, with check_finite, parameters that are about to be exchanged.

        Collective if `together`, or if ranks exchange in step.
        """
        if self.finite is not None:
            self.finite.judge_parameters(names, tensors, together)

    def guarded(self, optimizer: Any, refused: Callable[[], None]) -> Any:
        """Return the optimizer; with check_finite one that judges gradients before it steps.

        That one calls `refused` if it does not step.
        """
        return optimizer if self.finite is None else self.finite.guard(optimizer, refused)

    def refusals(self, buckets: Iterable[Bucket], others: Iterable[Evidence | None]) -> list[Exception]:
        """Return, with check_finite, what is to be raised now that gradients have been reduced.

        This rank had sent those of `buckets`, and others.
        """
        if self.finite is None:
            return []
        return self.finite.verdict([*(bucket.looked for bucket in buckets), *others])


@dataclass
class Bucket:
    """Some parameters whose gradients are reduced as one operation."""

    name: str
    members: list[int]
    flags: torch.Tensor
    layouts: list[tuple[torch.dtype, torch.Size, tuple[int, ...]]]  # dtype, shape and strides of each member
    device: Device | None = None  # of the core; None: the host
    pieces: int = 0
    waiting: int = 0  # of them, those whose gradients are not complete in this cycle
    complete: bool = False  # every member had a gradient on this rank when it was started
    handle: Handle | None = None
    sent: list[torch.Tensor] = field(default_factory=list)  # what is under way, by member
    states: list[Any] = field(default_factory=list)  # what compression needs to undo it
    places: SharedPlaces | None = None  # where they lie, unless they are reduced where backward has put them
    spare: SharedPlaces | None = None  # others, which somebody still looked at when they were to be used
    private: bool = False  # there are to be no places
    templates: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)  # dtype and shape of what is sent
    results: list[weakref.ref[torch.Tensor]] = field(default_factory=list)  # that have been reduced elsewhere
    looked: Evidence | None = None  # at what was sent last, with check_finite

    def gradients(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor | None] | None:
        """Return the gradients of the members, if each has one that is laid out as it was; else None."""
        found: list[torch.Tensor | None] = []
        for i, (dtype, shape, strides) in zip(self.members, self.layouts):
            grad = parameters[i].grad
            if grad is None or grad.is_sparse or grad.dtype != dtype or grad.shape != shape or grad.stride() != strides:
                self.templates = []
                return None
            found.append(grad)
        return found

    def describe_sent(self, grads: list[torch.Tensor]) -> list[Described]:
        """Return what the core needs to know of gradients that are sent as they are."""
        self.sent, self.states, described = grads, [], []
        if not self.templates:
            self.templates = [(code, shape) for _, _, code, shape in map(describe, [*grads, self.flags])]
        for tensor, (code, shape) in zip((*grads, self.flags), self.templates):
            address = tensor.data_ptr()
            described.append((address, address, code, shape))
        return described

    def has_reduced(self, gradients: Sequence[torch.Tensor | None]) -> bool:
        """Return whether one of the parameters' gradients is what a reduction has left there."""
        if self.places is not None:
            return any(gradients[i] is place for i, place in zip(self.members, self.places.views))
        return any(gradients[i] is not None and gradients[i] is kept() for i, kept in zip(self.members, self.results))


class Places:
    """A place in flat memory for the gradient of each member of a bucket.

    A gradient that is elsewhere is moved there as soon as backward has made a piece of them, while it is in the cache;
    `.grad` is the place then.

    Args:
        views: the places.
        members: the numbers of the parameters.
        parameters: all of them.
    """

    def __init__(self, views: list[torch.Tensor], members: Sequence[int], parameters: Sequence[torch.Tensor]) -> None:
        self.views = views
        self._members, self._parameters = members, parameters

    def elsewhere(self, first: int, last: int) -> list[int]:
        """Return which of some members have a gradient, or none, that is not in its place."""
        members, views, parameters = self._members, self.views, self._parameters
        return [k for k in range(first, last) if parameters[members[k]].grad is not views[k]]

    @torch.no_grad()
    def take(self, numbers: Sequence[int]) -> list[int]:
        """Move gradients to their places; return which members have none. Those have zeros in theirs."""
        into, fresh, none = [], [], []
        for k in numbers:
            parameter, view = self._parameters[self._members[k]], self.views[k]
            grad = parameter.grad
            if grad is None:
                view.zero_()
                none.append(k)
                continue
            into.append(view)
            fresh.append(grad.to_dense() if grad.is_sparse else grad)
            parameter.grad = view
        if into:
            torch._foreach_copy_(into, fresh)
        return none


class SharedPlaces(Places):
    """Places in memory that the node shares, with the flags of a bucket.

    Raises:
        TransportError: there is no such memory.
    """

    def __init__(
        self, context: Context, bucket: Bucket, specs: Sequence[Spec], parameters: Sequence[torch.Tensor]
    ) -> None:
        flags = (f"{bucket.name}.flags", dtype_code(bucket.flags), (len(bucket.members),))
        layout = Layout([*specs, flags], WHOLE)
        buffer = FlatBuffer(context, layout, bucket.flags.device)
        tensors = [*(parameters[i] for i in bucket.members), bucket.flags]
        *views, self.flags = (buffer.like(tensor, offset) for tensor, offset in zip(tensors, layout.offsets))
        super().__init__(views, bucket.members, parameters)
        self.requests: dict[str, Request] = {}
        """What reduces that which is here, by name. It never changes."""
        self._addresses = list(map(torch.Tensor.data_ptr, views))
        self._storages = [view.untyped_storage() for view in views]
        self._unseen = self._references(range(len(views)))

    def described(self) -> list[Described]:
        """Return what the core needs to know of the gradients, and of the flags."""
        return [describe(tensor, tensor) for tensor in (*self.views, self.flags)]

    def _references(self, numbers: Iterable[int]) -> list[tuple[int, int, int]]:
        """Count who has each place itself, its memory, or another tensor with that memory."""
        views, storages, count, of_memory = self.views, self._storages, sys.getrefcount, torch._C._storage_Use_Count
        return [(count(views[k]), count(storages[k]), of_memory(storages[k]._cdata)) for k in numbers]

    def fit(self, numbers: Iterable[int]) -> bool:
        """Return whether the gradients of these members can move here, and all places are what they were.

        A model that is cast gives `.grad` other memory. A sparse gradient is to be sparse again.
        """
        for k in numbers:
            parameter, view = self._parameters[self._members[k]], self.views[k]
            tensor = parameter if parameter.grad is None else parameter.grad
            if tensor.is_sparse or tensor.shape != view.shape or tensor.dtype != view.dtype:
                return False
        return list(map(torch.Tensor.data_ptr, self.views)) == self._addresses

    def are_free(self, numbers: Sequence[int]) -> bool:
        """Return whether nobody looks at what was in these places: at a gradient of an earlier step."""
        return self._references(numbers) == [self._unseen[k] for k in numbers]


def whole_layout(names: Sequence[str], parameters: Sequence[torch.Tensor]) -> Layout:
    """Return all parameters as one layout, for its hash."""
    return Layout([(label(name, p), dtype_code(p), tuple(p.shape)) for name, p in zip(names, parameters)], WHOLE)
