"""What the reduction of gradients is made of: its settings, its buckets, and the layout of what is reduced."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sordino._core import Device, Handle, Layout
from sordino.runtime.agreement import Agreement
from sordino.runtime.compression import Compression, Compressor
from sordino.runtime.nonfinite import Evidence, FiniteCheck
from sordino.runtime.places import WHOLE, Places
from sordino.runtime.process_set import ProcessSet
from sordino.runtime.tensors import Described, describe, dtype_code, label


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
    evaluates_once: bool = False  # the optimizer is known to evaluate a closure once in each step

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
    complete: bool = False  # every member had a gradient on this rank when it was started
    handle: Handle | None = None
    sent: list[torch.Tensor] = field(default_factory=list)  # what is under way, by member
    states: list[Any] = field(default_factory=list)  # what compression needs to undo it
    places: Places | None = None  # where they lie, once they persist
    private: bool = False  # there can be no places
    templates: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)  # dtype and shape of what is sent
    results: dict[int, weakref.ref[torch.Tensor]] = field(default_factory=dict)  # reduced elsewhere, by parameter
    looked: Evidence | None = None  # at what was sent last, with check_finite
    versions: list[int] = field(default_factory=list)  # of `sent`, by torch's counters, when the reduction began

    def gradients(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor | None] | None:
        """Return the gradients of the members, if each has one that is laid out as it was; else None."""
        found: list[torch.Tensor | None] = []
        for i, (dtype, shape, strides) in zip(self.members, self.layouts):
            grad = parameters[i].grad
            if (
                grad is None
                or grad.is_sparse
                or grad.dtype != dtype
                or grad.shape != shape
                or grad.stride() != strides
                or grad.is_neg()
            ):
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

    def shape_flags(self, count: int) -> None:
        """Send `count` flags from now on."""
        self.flags, self.templates = self.flags.new_zeros(count), []

    def persists(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Return whether every member has the gradient that the last reduction has left there."""
        for i, kept in self.results.items():
            gradient = parameters[i].grad
            if gradient is None or gradient is not kept():
                return False
        return len(self.results) == len(self.members)

    def has_reduced(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Return whether some member has the gradient that the last reduction has left there."""
        return (self.places is not None and self.places.has_some()) or any(
            parameters[i].grad is not None and parameters[i].grad is kept() for i, kept in self.results.items()
        )


def whole_layout(names: Sequence[str], parameters: Sequence[torch.Tensor]) -> Layout:
    """Return all parameters as one layout, for its hash."""
    return Layout([(label(name, p), dtype_code(p), tuple(p.shape)) for name, p in zip(names, parameters)], WHOLE)
