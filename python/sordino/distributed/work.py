"""Work: the object that an operation of torch.distributed returns.

A work holds the parts of its operation that are still in flight (`Part`), and waits for them in order. It has no parts
if the operation has ended when the call returns.

DDP waits for a `Future` in C++, so a thread must complete it. The collectives of a group end in order, so one thread
per group completes their futures. A message ends only when its peer takes part. So its future has a thread of its own,
and delays no other future.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch.futures import Future

from sordino.awake import Deadline
from sordino.distributed.untraced import untraced
from sordino.errors import SordinoError, UsageError

dist: Any = torch.distributed  # its annotations lack much of what a backend uses

_LOOK_S = 20e-6  # time between two checks of an operation that has a deadline of its own
_IDLE_S = 1.0  # a thread ends after this time without futures


class Part:
    """An operation of the core that is in flight.

    Args:
        is_done: returns whether the operation has ended. Not called again once `wait` has returned.
        wait: waits for the operation, and raises its error.
        finish: called once after `wait`, to put results in their places; None: nothing is to be done.
    """

    def __init__(
        self, is_done: Callable[[], bool], wait: Callable[[], object], finish: Callable[[], object] | None = None
    ) -> None:
        self._is_done, self._wait, self._finish = is_done, wait, finish
        self._inference = torch.is_inference_mode_enabled()  # tensors made in this mode can be written only in it
        self._error: Exception | None = None
        self._over = False
        self._lock = threading.Lock()

    def is_done(self) -> bool:
        """Return whether `complete` would return, or raise, at once."""
        return self._over or self._is_done()

    def complete(self) -> None:
        """Wait, and put results in their places. Raises the error of the operation, each time it is called."""
        with self._lock:
            if not self._over:
                try:
                    if self._inference == torch.is_inference_mode_enabled():
                        self._run()
                    else:
                        with torch.inference_mode(self._inference):
                            self._run()
                except Exception as error:
                    self._error = error
                self._over = True
                self._finish = None
        if self._error is not None:
            raise torch_error(self._error)

    def _run(self) -> None:
        self._wait()
        if self._finish is not None:
            self._finish()

    def settle(self) -> None:
        """Complete an operation that has ended. A later `complete` raises its error."""
        with suppress(Exception):
            self.complete()


def torch_error(error: Exception) -> Exception:
    """Convert an error of this library to the type that users of torch.distributed catch. Return others unchanged."""
    if isinstance(error, UsageError):
        return ValueError(str(error)).with_traceback(error.__traceback__)
    if isinstance(error, SordinoError):
        told: Exception = dist.DistBackendError(f"{type(error).__name__}: {error}")
        return told.with_traceback(error.__traceback__)
    return error


class SordinoWork(dist.Work):  # type: ignore[misc]
    """An operation of torch.distributed.

    Args:
        parts: operations of the core that are in flight.
        results: tensors that hold the result once the parts have ended.
        source: for a receive: returns the rank that has sent the message.
        timeout: time limit of the operation, from now on; None: the time limit of its group.
        completer: the thread that completes the futures of the group; None: this work's future has its own thread.
    """

    # Most works use none of these.
    _limit: tuple[float, timedelta] | None = None
    _future: Future[Any] | None = None
    _devices: Sequence[Any] = ()

    def __init__(
        self,
        parts: Sequence[Part],
        results: Sequence[torch.Tensor] = (),
        source: Callable[[], int] | None = None,
        timeout: timedelta | None = None,
        completer: Completer | None = None,
    ) -> None:
        super().__init__()
        self._completer = completer
        self._parts = parts
        self._results = results
        self._source = source
        if timeout is not None:
            self._limit = time.monotonic() + timeout.total_seconds(), timeout
        for tensor in results:
            if tensor.is_cuda:
                self._use_devices()
                break

    def _use_devices(self) -> None:
        self._devices = list({tensor.device: None for tensor in self._results if tensor.is_cuda})
        self._ready: list[torch.cuda.Event] = []  # after the operation, on the first waiter's streams
        self._lock = threading.Lock()

    @untraced
    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the results. Raises the operation's error, or DistBackendError at a time limit."""
        if self._limit is not None:
            end, limit = self._limit
            self._wait_for(end - time.monotonic(), limit)
        if timeout is not None and timeout > timedelta(0):
            self._wait_for(timeout.total_seconds(), timeout)
        for part in self._parts:
            part.complete()
        if self._devices:
            self._order_streams()
        return True

    def _order_streams(self) -> None:
        """Order the current streams after the operation. Its parts do this only for the streams of the first waiter."""
        streams = [torch.cuda.current_stream(device) for device in self._devices]
        with self._lock:
            if not self._ready:
                self._ready = [stream.record_event() for stream in streams]
        for stream, event in zip(streams, self._ready):
            stream.wait_event(event)

    def _wait_for(self, seconds: float, timeout: timedelta) -> None:
        """Wait until the operation has ended. Raises DistBackendError, which names `timeout`, after `seconds`.

        Time in which this process is stopped does not count.
        """
        deadline = Deadline(seconds)
        for part in self._parts:
            while not part.is_done():
                if deadline.passed():
                    raise dist.DistBackendError(f"the operation is not over after {timeout.total_seconds():g} s")
                time.sleep(_LOOK_S)

    @untraced
    def synchronize(self) -> None:
        self.wait()

    @untraced
    def is_completed(self) -> bool:
        """Return whether the operation has ended. Then results on the CPU are in their places; on a GPU call `wait`.

        Never raises the operation's error; `exception` returns it.
        """
        if not all(part.is_done() for part in self._parts):
            return False
        if not self._devices:
            for part in self._parts:
                part.settle()
        return True

    @untraced
    def exception(self) -> Exception | None:
        """Return the error of an operation that has ended; None if it has not ended, or has no error."""
        if not self.is_completed():
            return None
        try:
            self.wait()
        except Exception as error:
            return error
        return None

    @untraced
    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    @untraced
    def result(self) -> list[torch.Tensor]:
        """Return the tensors with the results, after waiting for them."""
        self.wait()
        return list(self._results)

    @untraced
    def source_rank(self) -> int:
        """Return the rank that has sent the received message."""
        self.wait()
        if self._source is None:
            raise ValueError("only a receive has a source")
        return self._source()

    _source_rank = source_rank

    @untraced
    def get_future(self) -> Future[Any]:
        """Return a future of the results. Python and C++ get the operation's error from it."""
        if self._future is None:
            began: Future[Any] = Future(devices=list(self._devices) or None)
            # Not set_exception: C++ would take the exception for the result. On a GPU, torch calls the function on
            # its own streams, and orders streams that wait for the future after them.
            self._future = began.then(lambda _: self.result())
            if self.is_completed():
                began.set_result(None)
            elif self._completer is None:
                Completer().add(self, began)
            elif self._completer.runs_here():
                self._completer.complete(self, began)  # this thread cannot take it from a queue now
            else:
                self._completer.add(self, began)
        return self._future


class Completer:
    """A thread that completes futures. It starts with the first future, and ends 1 s after the last one."""

    def __init__(self) -> None:
        self._works: queue.SimpleQueue[tuple[SordinoWork, Future[Any]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def add(self, work: SordinoWork, began: Future[Any]) -> None:
        with self._lock:
            self._works.put((work, began))
            if self._thread is None or not self._thread.is_alive():  # a forked child has no such thread
                self._thread = threading.Thread(target=self._run, name="sordino-futures", daemon=True)
                self._thread.start()

    def runs_here(self) -> bool:
        """Return whether the caller is in the thread that completes futures, so in a callback."""
        return threading.current_thread() is self._thread

    def complete(self, work: SordinoWork, began: Future[Any]) -> None:
        """Wait for an operation, and complete its future."""
        work.exception() if work.is_completed() else self._wait(work)
        began.set_result(None)

    def _run(self) -> None:
        while True:
            try:
                work, began = self._works.get(timeout=_IDLE_S)
            except queue.Empty:
                with self._lock:
                    if self._works.empty():
                        self._thread = None
                        return
                continue
            self.complete(work, began)
            del work, began  # frees the tensors while the thread waits for the next operation

    @staticmethod
    def _wait(work: SordinoWork) -> None:
        try:
            work.wait()
        except Exception:
            return  # result(), which the future calls, raises it again
