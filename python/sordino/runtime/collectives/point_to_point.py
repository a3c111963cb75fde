"""Messages between two ranks: blocking and asynchronous sends and receives.

`context.message` is the core's function for them (csrc/bindings/point_to_point.cc):

    message(sends, waits, tensor, peer, tag, set_id)

It returns None for tensors and arguments that this module has to convert, or refuse with an error.
"""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from numbers import Integral
from typing import Any

import torch

from sordino._core import Handle
from sordino.errors import UsageError
from sordino.runtime.collectives.operation import raising_recovered, set_id_of
from sordino.runtime.context import Context, current
from sordino.runtime.devices import HOST, core_device
from sordino.runtime.pending import Pending
from sordino.runtime.process_set import ProcessSet, global_process_set
from sordino.runtime.tensors import check, contiguous

_numbers = itertools.count(1)  # of asynchronous calls, for their names


def send(tensor: torch.Tensor, dst: int, tag: int = 0, process_set: ProcessSet = global_process_set) -> None:
    """Send a tensor to the rank `dst`, which calls `recv` or `recv_async` with the same tag and process set.

    Messages with the same source, destination, process set and tag arrive in the order of the calls. Returns when
    `tensor` may be changed. For a message of up to 64 KiB, this may be before the receiver's call, because a receiver
    buffers up to 1 MiB of messages of each sender. A larger message waits for its receive.

    Args:
        tensor: any shape, every dtype of the collectives; an array with `__dlpack__`, too. A tensor that is not
            contiguous, or is on a GPU, is copied to the host first.
        dst: rank in the world, also this rank itself.
        tag: number from 0 to 2^63 - 1.
        process_set: the set that both ranks belong to. Tags of different sets are separate.

    Raises:
        UsageError: `dst` or this rank is not in the set, or the tag or the tensor is not valid. Nothing was sent.
        OperationMismatch: the receive has another number of bytes or another dtype. Both calls have ended, and later
            messages are not affected. If the message was small, and sent before its receive was called, a later call of
            this rank that names the receiver raises this error instead, and does nothing else.
        PeerLost, Timeout, TransportError: the receiver is lost or has left, or does not receive in time. With
            on_peer_lost="continue" also if another rank is lost.
    """
    context = current()
    if context.message(True, True, tensor, dst, tag, process_set.process_set_id) is None:
        _Message(context, True, tensor, dst, tag, process_set).run()
    elif context.recorder is not None:
        context.note_return()


def recv(
    tensor: torch.Tensor, src: int | None = None, tag: int = 0, process_set: ProcessSet = global_process_set
) -> int:
    """Receive a message into `tensor`, and return the rank that sent it.

    Args:
        tensor: gets the values; its dtype and number of bytes must be those of the sent tensor. A tensor that is not
            contiguous, or is on a GPU, gets them by a copy.
        src: rank in the world, also this rank itself. None: any rank of the set, the one whose message arrives first.
        tag: number from 0 to 2^63 - 1; only messages with this tag are received.
        process_set: the set that both ranks belong to. Tags of different sets are separate.

    Raises:
        UsageError: `src` or this rank is not in the set, or the tag or the tensor is not valid.
        OperationMismatch: the message has another number of bytes or another dtype. The message is dropped, and later
            ones are not affected. Also an error of an earlier message to `src`, see `send`.
        PeerLost, Timeout, TransportError: the source is lost, or has left before it sent, or does not send in time.
            Without `src`: this applies to all other ranks of the set. With on_peer_lost="continue" also if another rank
            is lost.
    """
    context = current()
    source = context.message(False, True, tensor, src, tag, process_set.process_set_id)
    if source is None:
        return _Message(context, False, tensor, src, tag, process_set).run()  # type: ignore[no-any-return]
    if context.recorder is not None:
        context.note_return()
    return source  # type: ignore[no-any-return]


def send_async(tensor: torch.Tensor, dst: int, tag: int = 0, process_set: ProcessSet = global_process_set) -> int:
    """Start to send a tensor; return a handle for `poll` and `synchronize`, which returns None.

    `tensor` must not be changed until then. Arguments and errors are those of `send`.
    """
    return _start(True, tensor, dst, tag, process_set)


def recv_async(
    tensor: torch.Tensor, src: int | None = None, tag: int = 0, process_set: ProcessSet = global_process_set
) -> int:
    """Start to receive; return a handle for `poll` and `synchronize`, which returns the rank that sent the message.

    `tensor` must not be used until then. Arguments and errors are those of `recv`.
    """
    return _start(False, tensor, src, tag, process_set)


def _start(sends: bool, tensor: torch.Tensor, peer: int | None, tag: int, process_set: ProcessSet) -> int:
    context = current()
    handle = context.message(sends, False, tensor, peer, tag, process_set.process_set_id)
    if handle is None:
        return _Message(context, sends, tensor, peer, tag, process_set).start()
    return _pend(context, sends, handle, process_set.process_set_id, _nothing if sends else _source)


def _pend(context: Context, sends: bool, handle: Handle, set_id: int | None, finish: Any) -> int:
    name = f"{'send' if sends else 'recv'}.{next(_numbers)}"
    return context.pending.add(Pending(handle, finish, context.epoch, (set_id or 0, name)))


def _nothing(_: Handle) -> None:
    return None


def _source(handle: Handle) -> int:
    return handle.source


class _Message:
    """A call with a tensor or an argument that needs a conversion, or in a job whose ranks survive losses.

    If ranks survive losses, a receive writes to its own tensor, because data of a world that has ended may still
    arrive.
    """

    def __init__(
        self, context: Context, sends: bool, tensor: torch.Tensor, peer: int | None, tag: int, process_set: ProcessSet
    ) -> None:
        label = "send" if sends else "recv"
        numbers = {"tag": tag, "dst" if sends else "src": 0 if peer is None and not sends else peer}
        for name, value in numbers.items():
            if not isinstance(value, Integral) or isinstance(value, bool) or not 0 <= value < 2**63:
                raise UsageError(f"{label}: {name}={value!r} must be an integer from 0 to 2^63 - 1")
        self._context, self._sends = context, sends
        self._arguments = (None if peer is None else int(peer), int(tag), set_id_of(context, process_set, label))
        if peer is not None and peer >= context.size:
            raise UsageError(f"{label}: there is no rank {peer}; there are ranks 0 to {context.size - 1}")
        given = check(tensor)
        core_device(given.device, context)
        memory = given.as_subclass(torch.Tensor)
        plain = memory.device == HOST and memory.is_contiguous() and not memory.is_neg()
        self._copied: torch.Tensor | None = None
        if sends:
            memory = memory if plain else contiguous(memory).to(HOST)
        elif not (plain and context.losses.raises_on_loss):
            self._copied = given
            memory = torch.empty(given.shape, dtype=given.dtype, device=HOST)
        self._memory = memory

    def _call(self, waits: bool) -> Any:
        surviving = not self._context.losses.raises_on_loss
        with raising_recovered(self._context, self._context.epoch) if surviving else nullcontext():
            result = self._context.messenger(self._sends, waits, self._memory, *self._arguments)
        if result is None:
            raise UsageError(f"a {type(self._memory).__name__} of {self._memory.dtype} cannot be sent or received")
        return result

    @torch.no_grad()
    def _finish(self, result: Any) -> Any:
        if self._copied is not None:
            self._copied.copy_(self._memory)
        return result

    def run(self) -> Any:
        source = self._finish(self._call(waits=True))
        self._context.note_return()
        return source

    def start(self) -> int:
        handle = self._call(waits=False)

        def finish(handle: Handle) -> int | None:
            return self._finish(None if self._sends else handle.source)  # type: ignore[no-any-return]

        return _pend(self._context, self._sends, handle, self._arguments[2], finish)
