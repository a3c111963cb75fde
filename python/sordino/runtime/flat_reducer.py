"""Gradients in flat memory that exchanges average.

Exchanges are not negotiated, so segments start in the order of the plan, whenever their gradients come. They are not
waited for when backward ends, so until they are nobody may use them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch

from sordino._core import Handle
from sordino.errors import StepOrderError, UsageError
from sordino.runtime.bucket import Segment, Settings
from sordino.runtime.compression import Compression
from sordino.runtime.context import Context
from sordino.runtime.pending_gradients import PendingGradients
from sordino.runtime.reducer import GradientReducer

_NAMED = 8  # tensors that an error names
ALIGNMENT = 64  # bytes; of arenas, so that parts of equal size lie side by side


def part_length(count: int, parts: int, itemsize: int) -> int:
    """Return the elements of each of so many equal parts of `count` elements, such that every part is aligned."""
    step = ALIGNMENT // itemsize
    return -(-count // (parts * step)) * step


class Flat(Protocol):
    """Where the gradients of a segment lie."""

    views: list[torch.Tensor]

    def say_used(self, used: Sequence[bool]) -> None:
        """Note which members have a gradient on this rank."""

    def used(self) -> list[bool]:
        """Return which had one on some rank, once averaged."""


class FlatReducer(GradientReducer):
    """Averages gradients by exchanges, which start in the order of the plan.

    Attributes:
        instead_of_compression: what users who want gradients compressed can do instead.
    """

    instead_of_compression: str

    def __init__(
        self, context: Context, names: Sequence[str], parameters: Sequence[torch.Tensor], settings: Settings
    ) -> None:
        if settings.compression is not Compression.none:
            raise UsageError(f"compression= needs {self.instead_of_compression}: gradients are averaged as they are")
        super().__init__(context, names, parameters, settings, compare=True)
        self._complete_segments: set[str] = set()
        self._pending = PendingGradients(self.names, self.parameters)

    def release(self) -> None:
        self._pending.show()
        super().release()

    def _count(self, index: int) -> None:
        if self._pending:  # autograd has added to one
            self._pending.show()
        super()._count(index)

    def _backward_ended(self) -> None:
        self._pending.hide()

    def _start_rest(self) -> None:
        self._show_pending()
        super()._start_rest()

    def prepare(self) -> None:
        self._show_pending()
        super().prepare()

    def _show_pending(self) -> None:
        """Make gradients usable again. StepOrderError where some have been replaced meanwhile."""
        replaced = self._pending.show()
        if replaced:
            raise StepOrderError(
                f"the gradients of {', '.join(map(repr, replaced[:_NAMED]))} were replaced or cleared while they were "
                "being averaged. Before step(), call optimizer.clip_grad_norm_() to clip gradients, or "
                "optimizer.synchronize() to change them"
            )

    @abstractmethod
    def _flat(self, segment: Segment) -> Flat:
        """Return where the segment's gradients lie."""

    @abstractmethod
    def _exchange(self, segment: Segment) -> Handle:
        """Start what averages them."""

    def _begin_cycle(self) -> None:
        super()._begin_cycle()
        self._pending.show()
        self._complete_segments = set()

    def _start(self, segment: Segment) -> None:
        self._complete_segments.add(segment.name)
        for one in self._segments or ():
            if one.handle is None:
                if one.name not in self._complete_segments:
                    return
                self._launch(one)

    @torch.no_grad()
    def _launch(self, segment: Segment) -> None:
        flat = self._flat(segment)
        grads = segment.gradients(self.parameters)
        if grads is None:
            grads = [self._dense_gradient(i) for i in segment.members]
        flat.say_used([grad is not None for grad in grads])
        for i, grad, view in zip(segment.members, grads, flat.views):
            if grad is None:
                view.zero_()
            elif grad.data_ptr() != view.data_ptr():
                view.copy_(grad)
                self.parameters[i].grad = view
        if self.settings.finite is not None:
            segment.looked = self.settings.look(segment.members, flat.views)
        segment.handle = self._exchange(segment)

    def _finish(self, segment: Segment) -> None:
        handle, segment.handle = segment.handle, None
        assert handle is not None
        handle.wait()
        self._take_over(segment)
        self._unused.update(i for i in segment.members if self.parameters[i].grad is None)

    def _take_over(self, segment: Segment) -> None:
        """Do what follows when a segment has been averaged."""
