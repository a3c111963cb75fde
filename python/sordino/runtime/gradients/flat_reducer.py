"""Reducer that averages gradients in flat memory by exchanges.

Exchanges are not negotiated, so buckets start in the order of the plan, even if their gradients come in another order.
The end of backward does not wait for them. Until they are done, gradients must not be used: `.grad` is a stand-in with
the same memory, which raises on every use. This affects Python only: autograd can still add to the memory.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from sordino._core import Handle
from sordino.errors import StepOrderError, UsageError
from sordino.runtime.collectives.compression import Compression
from sordino.runtime.context import Context
from sordino.runtime.devices import HOST
from sordino.runtime.gradients.bucket import Bucket
from sordino.runtime.gradients.reducer import GradientReducer, versions_of
from sordino.runtime.gradients.settings import Settings

_NAMED = 8  # maximum number of tensors in an error
ALIGNMENT = 64  # bytes, as in arenas, so that parts of equal size are adjacent


def part_length(count: int, parts: int, itemsize: int) -> int:
    """Return the number of elements of a part, if `count` elements are divided into equal, aligned parts."""
    step = ALIGNMENT // itemsize
    return -(-count // (parts * step)) * step


class FlatGradients:
    """Memory of a bucket's gradients, and flags of the members that have one.

    Attributes:
        views: memory of each member's gradient.
        complete: whether each member has a gradient on this rank.

    Args:
        flags: tensors with one flag per member, which are averaged like the gradients; one tensor for each part that
            has an owner of its own.
    """

    def __init__(self, views: list[torch.Tensor], flags: list[torch.Tensor]) -> None:
        self.views, self.flags = views, flags
        self.complete = False

    def say_used(self, used: Sequence[bool]) -> None:
        """Set the flags of members with a gradient on this rank, without waiting for a GPU if all have one."""
        self.complete = all(used)
        for flags in self.flags:
            if self.complete:
                flags.fill_(1)
            else:
                flags.copy_(torch.tensor(used, device=HOST))

    def used(self) -> list[bool]:
        """Return, after the exchange, which members had a gradient on some rank."""
        if self.complete:
            return [True] * len(self.views)
        return (torch.stack(self.flags).amax(0) > 0).tolist()


# Functions that zero_grad(set_to_none=False) of a module calls. They are allowed after the gradient has been used.
_CLEARING = ("zero_", "detach_", "requires_grad_", "__get__")


class PendingGradient(torch.Tensor):
    """Stand-in for a gradient, which raises when it is used."""

    of_parameter: str
    is_used: bool  # step() has used the gradient, so it may be cleared

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = _first_pending((args, kwargs))
        called = getattr(func, "__name__", str(func))
        if found is None or (found.is_used and called in _CLEARING):
            return super().__torch_function__(func, types, args, kwargs or {})
        why = "was averaged in parts, and this rank has only its part" if found.is_used else "is being averaged"
        raise StepOrderError(
            f"the gradient of '{found.of_parameter}' {why}: {called}() would use this rank's own gradient. To clip "
            "gradients, call optimizer.clip_grad_norm_() before step(); to read, unscale or change them, call "
            "optimizer.synchronize(), and then step() within optimizer.skip_synchronize()"
        )


def _first_pending(value: Any) -> PendingGradient | None:
    if isinstance(value, PendingGradient):
        return value
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (list, tuple)):
        return next((found for one in value if (found := _first_pending(one)) is not None), None)
    return None


class PendingGradients:
    """Gradients of `parameters` that must not be used now.

    Args:
        names: names of the parameters.
        parameters: the parameters.
    """

    def __init__(self, names: Sequence[str], parameters: Sequence[torch.Tensor]) -> None:
        self._names, self._parameters = names, parameters
        self.hidden: dict[int, tuple[PendingGradient, torch.Tensor]] = {}
        """Current stand-ins and their gradients, by the index of the parameter."""

    def hide(self, used: bool = False) -> None:
        """Replace all gradients by stand-ins.

        Args:
            used: whether a step has used the gradients, so that they may be cleared.
        """
        for index, parameter in enumerate(self._parameters):
            gradient = parameter.grad
            if gradient is None or isinstance(gradient, PendingGradient):
                continue
            stand_in: PendingGradient = torch.Tensor._make_subclass(PendingGradient, gradient)
            stand_in.of_parameter, stand_in.is_used = self._names[index], used
            parameter.grad = stand_in
            self.hidden[index] = stand_in, gradient

    def show(self) -> list[str]:
        """Restore the gradients. Return the names of gradients that were replaced or removed before they were used."""
        hidden, self.hidden = self.hidden, {}
        replaced = []
        for index, (stand_in, gradient) in hidden.items():
            parameter = self._parameters[index]
            if parameter.grad is stand_in:
                parameter.grad = gradient
            elif not stand_in.is_used:
                replaced.append(self._names[index])
        return replaced


class FlatReducer(GradientReducer):
    """Averages gradients by exchanges, which start in the order of the plan.

    Attributes:
        instead_of_compression: alternative for users of compression, for an error message.
    """

    instead_of_compression: str

    def __init__(
        self, context: Context, names: Sequence[str], parameters: Sequence[torch.Tensor], settings: Settings
    ) -> None:
        if settings.codec is not None or settings.compression is not Compression.none:
            raise UsageError(f"compression= needs {self.instead_of_compression}: gradients are averaged uncompressed")
        super().__init__(context, names, parameters, settings, compare=True)
        self._flats: dict[str, FlatGradients] = {}
        """Memory of the gradients of each bucket; set by subclasses."""
        self._complete_buckets: set[str] = set()
        self._pending = PendingGradients(self.names, self.parameters)

    def release(self) -> None:
        self._pending.show()
        super().release()

    def backward_adds(self, index: int) -> None:
        if self._pending.hidden:
            self._pending.show()
        super().backward_adds(index)

    def _backward_ended(self) -> None:
        self._pending.hide()

    def _start_rest(self) -> None:
        self._show_pending()
        super()._start_rest()

    def prepare(self) -> None:
        self._show_pending()
        super().prepare()

    def _show_pending(self) -> None:
        """Restore the gradients. Raises StepOrderError if one has been replaced meanwhile."""
        replaced = self._pending.show()
        if replaced:
            raise StepOrderError(
                f"the gradients of {', '.join(map(repr, replaced[:_NAMED]))} were replaced or cleared while they were "
                "being averaged. Before step(), call optimizer.clip_grad_norm_() to clip gradients, or "
                "optimizer.synchronize() to change them"
            )

    @abstractmethod
    def _exchange(self, bucket: Bucket) -> Handle:
        """Start the exchange that averages the gradients of a bucket."""

    def begin_cycle(self) -> None:
        super().begin_cycle()
        self._pending.show()
        self._complete_buckets = set()

    def _start(self, bucket: Bucket) -> None:
        self._complete_buckets.add(bucket.name)
        for one in self._buckets or ():
            if one.handle is None:
                if one.name not in self._complete_buckets:
                    return
                self._launch(one)

    @torch.no_grad()
    def _launch(self, bucket: Bucket) -> None:
        flat, used = self._flats[bucket.name], []
        if bucket.device is not None:
            bucket.device.wait_for(self._counter.streams(bucket.members[0]))
        for i, view in zip(bucket.members, flat.views):
            grad = self.parameters[i].grad
            used.append(grad is not None)
            if grad is None:
                view.zero_()
            elif grad is not view:
                view.copy_(grad.to_dense() if grad.is_sparse else grad)
                if grad.is_cuda and not grad.is_sparse:  # else torch may reuse its memory before this stream reads it
                    grad.record_stream(torch.cuda.current_stream(grad.device))
                self.parameters[i].grad = view
        flat.say_used(used)
        if self.settings.finite is not None:
            bucket.looked = self.settings.look(bucket.members, flat.views)
        bucket.sent = flat.views
        bucket.versions = versions_of(flat.views)
        bucket.handle = self._exchange(bucket)

    def _finish(self, bucket: Bucket) -> None:
        self._wait_for(bucket)
        for i in bucket.members:
            if self.parameters[i].grad is None:
                self._unused.add(i)
