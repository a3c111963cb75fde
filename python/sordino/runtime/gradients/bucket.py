"""Parts of gradient reduction: settings, buckets, and the layout of the parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sordino._core import Device, Handle, Layout
from sordino.runtime.collectives.compression import Compression, Compressor
from sordino.runtime.gradients.nonfinite import Evidence, FiniteCheck
from sordino.runtime.gradients.places import WHOLE, Places
from sordino.runtime.gradients.settings_check import SettingsCheck
from sordino.runtime.process_set import ProcessSet
from sordino.runtime.tensors import Described, describe, dtype_code, label


@dataclass(frozen=True)
class Settings:
    """Settings of gradient reduction.

    The fields are arguments of `DistributedOptimizer`, the check of its ranks' settings, and values derived from them.
    """

    op: int
    process_set: ProcessSet
    bucket_bytes: int
    check: SettingsCheck
    compression: type[Compressor] = Compression.none
    passes: int = 1
    predivide: float = 1.0
    sparse_as_dense: bool = False
    groups: tuple[tuple[int, ...], ...] = ()  # parameter indices that the user wants reduced together
    finite: FiniteCheck | None = None
    members: tuple[int, ...] = ()  # identities in the process set when the algorithm was chosen
    evaluates_once: bool = False  # the optimizer is known to evaluate a closure once in each step

    def look(self, members: Sequence[int], gradients: Sequence[torch.Tensor]) -> Evidence | None:
        """Return, with check_finite, which of the gradients to be sent are not finite; else None."""
        return None if self.finite is None else Evidence(members, gradients)

    def judge(self, names: Sequence[str], tensors: Sequence[torch.Tensor], together: bool = False) -> None:
        """Check, with check_finite, that parameters to be exchanged are finite; raise NonFinite if not.

        Collective if `together`, or if the ranks ask each other (`FiniteCheck`).
        """
        if self.finite is not None:
            self.finite.judge_parameters(names, tensors, together)

    def guarded(self, optimizer: Any, refused: Callable[[], None]) -> Any:
        """Return the optimizer; with check_finite a wrapper that checks gradients before it steps.

        The wrapper calls `refused` if it does not step.
        """
        return optimizer if self.finite is None else self.finite.guard(optimizer, refused)

    def refusals(self, buckets: Iterable[Bucket], others: Iterable[Evidence | None]) -> list[Exception]:
        """Return, with check_finite, the errors to raise after gradients have been reduced.

        Args:
            buckets: buckets that this rank has sent.
            others: evidence of the other gradients that it has sent.
        """
        if self.finite is None:
            return []
        return self.finite.verdict([*(bucket.looked for bucket in buckets), *others])


@dataclass
class Bucket:
    """Bucket: parameters whose gradients are reduced as one operation."""

    name: str
    members: list[int]
    flags: torch.Tensor
    layouts: list[tuple[torch.dtype, torch.Size, tuple[int, ...]]]  # dtype, shape and strides of each member
    device: Device | None = None  # of the core; None: the host
    complete: bool = False  # every member had a gradient on this rank at the start
    handle: Handle | None = None
    sent: list[torch.Tensor] = field(default_factory=list)  # tensors being reduced, by member
    states: list[Any] = field(default_factory=list)  # state for decompression
    places: Places | None = None  # shared memory of the gradients, once they persist
    private: bool = False  # no shared memory available
    templates: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)  # dtype and shape of `sent`
    results: dict[int, weakref.ref[torch.Tensor]] = field(default_factory=dict)  # reduced outside of `places`
    looked: Evidence | None = None  # for the gradients sent last, with check_finite
    versions: list[int] = field(default_factory=list)  # torch's version counters of `sent` at the start

    def gradients(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor | None] | None:
        """Return the gradients of the members; None if one is missing, or differs in dtype, shape or strides."""
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
        """Return descriptions for the core of gradients that are sent uncompressed, and of the flags."""
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
        """Return whether every member still has the gradient from the last reduction."""
        for i, kept in self.results.items():
            gradient = parameters[i].grad
            if gradient is None or gradient is not kept():
                return False
        return len(self.results) == len(self.members)

    def has_reduced(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Return whether some member still has the gradient from the last reduction."""
        return (self.places is not None and self.places.has_some()) or any(
            parameters[i].grad is not None and parameters[i].grad is kept() for i, kept in self.results.items()
        )


def whole_layout(names: Sequence[str], parameters: Sequence[torch.Tensor]) -> Layout:
    """Return all parameters as one layout, for its hash."""
    return Layout([(label(name, p), dtype_code(p), tuple(p.shape)) for name, p in zip(names, parameters)], WHOLE)
