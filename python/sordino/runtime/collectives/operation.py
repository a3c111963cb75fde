"""Description of one collective operation: its name, its tensors, and how to wait for it.

Ranks match operations by name, so they may submit them in any order. A difference between ranks (shape, dtype,
reduction, root) is an error on all of them. A name is in use from the start of an operation until this rank has waited
for it (`synchronize`, or a `poll` that returns True), even if the operation is complete before.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch

from sordino._core import Handle, Request
from sordino.errors import SordinoError, UsageError
from sordino.runtime import opcode
from sordino.runtime.context import Context, current
from sordino.runtime.devices import common_device, core_device
from sordino.runtime.pending import Pending
from sordino.runtime.process_set import ProcessSet, global_process_set
from sordino.runtime.recovery.losses import LOSSES, recover, together
from sordino.runtime.tensors import describe

Average = 0
Sum = 1
Adasum = 2
Min = 3
Max = 4
Product = 5
_OP_NAMES = ("Average", "Sum", "Adasum", "Min", "Max", "Product")

Finish = Callable[[Handle], Any]


def resolve_op(op: int | None, average: bool | None) -> int:
    """Return the reduction for Horovod's two arguments, `op` and the deprecated `average`."""
    if average is not None:
        if op is not None:
            raise UsageError("The op parameter supersedes average. Please provide only one of them.")
        warnings.warn("Parameter `average` is deprecated; use `op=` instead.", DeprecationWarning, stacklevel=3)
        return Average if average else Sum
    if op is None:
        return Average
    if not isinstance(op, Integral) or isinstance(op, bool) or not 0 <= op < len(_OP_NAMES):
        raise UsageError(f"unknown reduction op={op!r}; expected one of {', '.join(_OP_NAMES)}")
    return int(op)


def name_of_op(op: int) -> str:
    """Return the name of a reduction constant."""
    return _OP_NAMES[op]


def require_finite(name: str, factor: object) -> None:
    """Raise UsageError for a factor that is not a finite number.

    Such a factor would make the tensors of all ranks NaN. Besides, ranks compare factors, and NaN differs from itself.
    """
    try:
        finite = math.isfinite(factor)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a tensor with several elements
        finite = False
    if not finite:
        raise UsageError(f"{name}={factor!r}: must be a finite number")


@dataclass(frozen=True)
class Reduction:
    """Settings of an all-reduce or reducescatter."""

    op: int
    prescale: float
    postscale: float
    process_set: ProcessSet

    def __post_init__(self) -> None:
        require_finite("prescale_factor", self.prescale)
        require_finite("postscale_factor", self.postscale)

    def options(self) -> dict[str, Any]:
        """Return the arguments for the core."""
        return {"op": self.op, "prescale": float(self.prescale), "postscale": float(self.postscale)}


def set_id_of(context: Context, process_set: ProcessSet, label: str) -> int:
    """Return the id of a process set. Raises UsageError if it does not exist, or if this rank is not a member."""
    identity = process_set.process_set_id
    if identity is None or identity not in context.world.sets():
        raise UsageError(f"{label}: Process set provided does not exist, or has not been registered: {process_set}")
    if identity != 0 and context.rank not in context.world.members(identity):
        raise UsageError(f"{label}: Rank {context.rank} is not a member of the provided process set {process_set}")
    return identity


class Operation:
    """One collective, described but not started. `run()` returns its result, `start()` a handle.

    If ranks survive losses, the operation writes to its own tensors, which are copied to the user's tensors on success,
    because data of a world that has ended may still arrive.
    """

    def __init__(
        self,
        code: int,
        label: str,
        name: str | None,
        tensors: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
        finish: Finish,
        process_set: ProcessSet = global_process_set,
        **options: Any,
    ) -> None:
        self.context = current()
        set_id = set_id_of(self.context, process_set, label)
        self.finish = finish
        self._process_set = process_set
        self._tensors = list(tensors)
        self._copied: list[tuple[torch.Tensor, torch.Tensor]] = []  # tensors, and the tensors written instead
        self._root = self.context.identities[options["root"]] if "root" in options else None
        place = common_device([source for source, _ in tensors], f"the tensors of {label}")
        self._device = core_device(place, self.context) if tensors else None
        self._opcode, self._options = code, options
        self._name = set_id, self.context.names.operation(label, name, set_id)

    def _prepared(self, uncopied: bool) -> Request:
        """Return the request to the core in the current world."""
        tensors = self._tensors if uncopied else self._copies()
        root = 0 if self._root is None else self.context.rank_of(self._root, "the root of an operation")
        described = [describe(source, target) for source, target in tensors]
        option = self._options.get
        return Request(  # by position: keywords would cost a small all-reduce a microsecond
            self._opcode,
            self._name[1],
            described,
            option("op", Sum),
            option("prescale", 1.0),
            option("postscale", 1.0),
            root,
            option("splits", ()),
            self._process_set.process_set_id,
            tensors,
            self._device,
        )

    @torch.no_grad()
    def _copies(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        pairs: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._copied = []
        for source, target in self._tensors:
            if target is None:
                pairs.append((source, None))
                continue
            room = source.clone() if target is source else torch.empty_like(target)
            pairs.append((room if target is source else source, room))
            self._copied.append((target, room))
        return pairs

    def _take_name(self) -> None:
        """Raise UsageError if the name belongs to an operation that has not been waited for.

        The error does not depend on whether that operation has ended, because that depends on other ranks' speed.
        """
        if self._name in self.context.pending.taken:
            raise UsageError(
                f"'{self._name[1]}' has been started, but not waited for: call synchronize() with its handle first (or "
                "poll() until it returns True), or use another name"
            )

    def start(self) -> int:
        self._take_name()
        with raising_recovered(self.context, self.context.epoch):
            handle = self.context.world.submit(self._prepared(self.context.losses.raises_on_loss))
        return self.context.pending.add(Pending(handle, self._finish, self.context.epoch, self._name))

    def run(self) -> Any:
        self._take_name()
        if self.context.losses.raises_on_loss:
            handle = self._run(uncopied=True)
        elif self._opcode == opcode.ALLTOALL:  # its splits are for the current number of ranks
            with raising_recovered(self.context, self.context.epoch):
                handle = self._run(uncopied=False)
        else:
            handle = together(self.context, self._process_set, lambda: self._run(uncopied=False))
        result = self._finish(handle)
        self.context.note_return()
        return result

    def _run(self, uncopied: bool) -> Handle:
        handle = self.context.world.run(self._prepared(uncopied))
        handle.wait()
        return handle

    @torch.no_grad()
    def _finish(self, handle: Handle) -> Any:
        for tensor, room in self._copied:
            tensor.copy_(room)
        return self.finish(handle)


def poll(handle: int) -> bool:
    """Return whether `synchronize(handle)` would return at once. If so, the operation's name is free again.

    Raises UsageError for a handle that is not pending.
    """
    context = current()
    pending = context.pending.find(handle)
    if pending is None:
        raise UsageError(f"Handle {handle!r} was not created or has been cleared.")
    done = pending.handle.done()
    if done:
        context.pending.free_name(handle, pending.name)
    return done


def synchronize(handle: int) -> Any:
    """Wait for an asynchronous operation and return its result.

    Return None if it was waited for before, as in Horovod.

    Raises:
        UsageError: no operation has returned this handle since `init()`. Horovod returns None in this case.
        OperationMismatch, PeerLost, Timeout, TransportError: the operation failed.
    """
    context = current()
    if not context.pending.has_given(handle):
        raise UsageError(
            f"synchronize({handle!r}): no operation of this rank has that handle; pass the handle that an asynchronous "
            "operation, such as allreduce_async, has returned"
        )
    if (refusable := context.pending.find(handle)) is not None:
        refusable.handle.check_wait()  # if this raises, the handle stays valid for a later call
    pending = context.pending.remove(handle)
    if pending is None:
        return None
    context.pending.free_name(handle, pending.name)
    try:  # without a context manager, which would take a third of the call's time
        pending.handle.wait()
    except LOSSES as error:
        _recover(context, error, pending.epoch)
        raise
    except BaseException as error:
        if not isinstance(error, Exception):  # Ctrl-C, which has ended the operations of the world
            context.pending.put_back(handle, pending)
        raise
    result = pending.finish(pending.handle)
    context.note_return()
    return result


def synchronize_all(handles: Iterable[int]) -> list[Any]:
    """Wait for all of these operations and return their results, or raise the first error after that.

    So none of them stays pending, which would keep its name in use.
    """
    results, failures = [], []
    for handle in handles:
        try:
            results.append(synchronize(handle))
        except SordinoError as error:
            failures.append(error)
    if failures:
        raise failures[0]
    return results


@contextmanager
def raising_recovered(context: Context, epoch: int) -> Iterator[None]:
    """If ranks survive losses, delay an error about a loss until the remaining ranks have recovered."""
    try:
        yield
    except LOSSES as error:
        _recover(context, error, epoch)
        raise


def _recover(context: Context, error: SordinoError, epoch: int) -> None:
    if not context.losses.raises_on_loss:
        recover(context, error, epoch)
