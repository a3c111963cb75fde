"""Processes of a job: signals are passed on to them, mpirun runs to its end, and no process remains."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

from sordino.awake import Deadline

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
GRACE_S = 10.0  # from a signal that stops the job until its processes are killed
_MOMENT_S = 1.0
_LOOK_S = 0.05
_LOOKS = 6
# Signals that mean "stop the job". SIGHUP: the terminal was closed.
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Signals for the program, such as a batch system's request for a checkpoint. They do not stop the job.
FOR_THE_PROGRAM = (signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class Ended:
    """End of a launcher.

    Attributes:
        status: exit status; 128 + N if signal N ended it, or if it failed after this process received the stop signal
            N; 124 after a timeout.
        stopped: the stop signal that this process received; 0 without one.
        killed: whether a signal ended the launcher although this process received no stop signal.
        why: reason, for a message; "" if unknown.
    """

    status: int
    stopped: int = 0
    killed: bool = False
    why: str = ""


class StopSignals:
    """Context manager that passes signals of this process on to other processes.

    | signal | effect |
    |---|---|
    | SIGINT, SIGTERM, SIGHUP | recorded and passed on; the others are killed `grace` seconds after the first one |
    | SIGHUP that was ignored before (nohup) | stays ignored |
    | SIGUSR1, SIGUSR2 | passed on |
    | SIGTSTP (Ctrl-Z) | passed on, then stops this process; when it is continued, the others get SIGCONT |
    """

    def __init__(self, grace: float = GRACE_S) -> None:
        self.received: list[int] = []
        self.grace = grace
        self._send: Callable[[int], None] | None = None
        self._deferred: list[int] | None = None  # signals that `_send` gets later
        self._stops = 0  # process that has to be stopped before this one stops
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            handlers = {
                **dict.fromkeys(_FORWARDED, self._note),
                **dict.fromkeys(FOR_THE_PROGRAM, self._pass_on),
                signal.SIGTSTP: self._pause,
                signal.SIGALRM: self._kill,
            }
            if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
                del handlers[signal.SIGHUP]
            self._before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        return self

    def __exit__(self, *_: object) -> None:
        for number, previous in self._before.items():
            signal.signal(number, previous)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.received.append(number)
        self._hand_on(number)

    def _hand_on(self, number: int) -> None:
        if self._send is None:
            return
        self._deliver(number)
        # An alarm, so that a waiting caller needs no clock. An alarm that is set already stays unchanged.
        if signal.getitimer(signal.ITIMER_REAL)[0] == 0:
            signal.setitimer(signal.ITIMER_REAL, max(self.grace, _LOOK_S))

    def _kill(self, _number: int, _frame: FrameType | None) -> None:
        self._deliver(signal.SIGKILL)

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        self._deliver(number)

    def _deliver(self, number: int) -> None:
        if self._deferred is not None:
            self._deferred.append(number)
        elif self._send is not None:
            self._send(number)

    def _pause(self, _number: int, _frame: FrameType | None) -> None:
        send = self._send
        if send is not None:
            send(signal.SIGTSTP)
            # Wait until it has stopped, because otherwise it could stop itself after it was continued.
            limit = time.monotonic() + _MOMENT_S
            while self._stops and time.monotonic() < limit and state_and_parent(self._stops)[0] not in ("T", "Z", ""):
                time.sleep(0.01)
        own = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)  # returns when this process is continued
        signal.signal(signal.SIGTSTP, own)
        if send is not None:
            send(signal.SIGCONT)
            for _ in range(_LOOKS):  # a slow process may have stopped itself after SIGCONT
                if not self._stops:
                    break
                time.sleep(_LOOK_S)
                if state_and_parent(self._stops)[0] == "T":
                    send(signal.SIGCONT)

    @contextlib.contextmanager
    def to(self, send: Callable[[int], None], stops: int = 0) -> Iterator[None]:
        """Pass signals to `send(number)` within the block, beginning with the last stop signal before the block.

        Args:
            send: function that sends a signal to the other processes.
            stops: process that stops itself after SIGTSTP, which this process waits for; 0: none.
        """
        self._send, self._stops = send, stops
        if self.received:
            self._hand_on(self.received[-1])
        try:
            yield
        finally:
            self._send, self._stops = None, 0
            if self.received:
                signal.setitimer(signal.ITIMER_REAL, 0)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Defer signals to the end of the block, so that a process that the block starts gets them, too.

        SIGTSTP is not deferred, because this process stops at once.
        """
        self._deferred = []
        try:
            yield
        finally:
            numbers, self._deferred = self._deferred, None
            for number in numbers:
                self._deliver(number)

    def sleep(self, seconds: float) -> None:
        """Sleep for `seconds`, or until a stop signal comes."""
        until = time.monotonic() + seconds
        while not self.received and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, _LOOK_S))


def sender(pid: int) -> Callable[[int], None]:
    """Return a function that sends a signal to a process, unless it has ended."""

    def send(number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    return send


def supervise(
    words: Sequence[str],
    environment: Mapping[str, str],
    stop: StopSignals,
    timeout: float | None = None,
    output: BinaryIO | None = None,
    errors: int | None = None,
    inherited: Sequence[int] = (),
    over: Callable[[], bool] | None = None,
) -> Ended:
    """Run a launcher to its end, with this process's stdin.

    Args:
        words: command line of the launcher.
        environment: environment of the launcher.
        stop: signals that are passed to the launcher.
        timeout: limit in seconds; None: no limit.
        output: file for stdout and stderr; None: those of this process.
        errors: a descriptor for stderr, instead of `output`.
        inherited: descriptors that the launcher inherits.
        over: called repeatedly; returns whether the job is over. A launcher that stays after that is ended.
    """
    with subreaper() as reap:
        # The child has its own process group: Ctrl-C in a terminal reaches this process only, which passes it on
        # once. Two interrupts at once would make mpirun exit without ending its ranks.
        child = subprocess.Popen(
            words,
            env=environment,
            stdout=output,
            stderr=output if errors is None else errors,
            pass_fds=inherited,
            preexec_fn=_prepare_child,
        )
        with stop.to(sender(child.pid)):
            try:
                status = child.wait(timeout) if over is None else _wait_until(over, child, timeout, reap)
            except subprocess.TimeoutExpired:
                child.terminate()
                _wait_or_kill(child, 5 * _MOMENT_S)
                return Ended(124)
    stopped = stop.received[0] if stop.received else 0
    if status < 0:
        return Ended(128 + (stopped or -status), stopped, killed=not stopped)
    return Ended(128 + stopped if status != 0 and stopped else status, stopped)


def _wait_until(
    over: Callable[[], bool],
    child: subprocess.Popen[bytes],
    timeout: float | None,
    reap: Callable[[Collection[int]], None],
) -> int:
    """Return the launcher's status; 0 if it stayed after the end of the job, and had to be ended."""
    limit = None if timeout is None else Deadline(timeout)
    with _end_of(child) as end:
        while not over():
            reap([child.pid])
            if end.poll(_LOOK_S * 1000):
                return child.wait()
            if limit is not None and limit.passed():
                raise subprocess.TimeoutExpired(child.args, timeout or 0)
    try:
        return max(child.wait(_MOMENT_S), 0)
    except subprocess.TimeoutExpired:
        child.terminate()
        _wait_or_kill(child, _MOMENT_S / 2)
        return 0


def descriptor_of_end(child: int) -> int:
    """Return a descriptor that becomes readable when a child process has ended. The process is not reaped.

    Some Pythons have no `os.pidfd_open`, and some sandboxes forbid it. There a thread waits for the process.
    """
    with contextlib.suppress(AttributeError, OSError):
        return os.pidfd_open(child)
    reading, writing = os.pipe()

    def wait() -> None:
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        os.close(writing)

    threading.Thread(target=wait, daemon=True).start()
    return reading


@contextlib.contextmanager
def _end_of(child: subprocess.Popen[bytes]) -> Iterator[select.poll]:
    """Yield a poll object for the child's end. It notices the end at once, while `Popen.wait(timeout)` polls."""
    descriptor = descriptor_of_end(child.pid)
    try:
        end = select.poll()
        end.register(descriptor, select.POLLIN)
        yield end
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def subreaper() -> Iterator[Callable[[Collection[int]], None]]:
    """Adopt orphaned descendants within the block, and end those that remain at its end, if this user may do that.

    Otherwise ranks (and their data loaders) would continue after mpirun was killed.

    Yields:
        a function that reaps adopted children that have ended. Its argument: the children that the caller has started.
    """
    others = set(_children())
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)

    def reap(own: Collection[int]) -> None:
        with contextlib.suppress(ChildProcessError):  # there is no child
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if ended.si_pid in own or ended.si_pid in others:
                    break  # a later call reaps the rest, when the caller has reaped this one
                os.waitpid(ended.si_pid, os.WNOHANG)

    try:
        yield reap
    finally:
        # Children of an orphan are adopted only when the orphan is dead, so this repeats until no child is left. Ten
        # rounds at most, so that a process that even SIGKILL does not end (a dead disk) cannot block this one.
        for _ in range(10):
            if not (left := set(_children()) - others):
                break
            others |= _end(left)
        _prctl(_PR_SET_CHILD_SUBREAPER, 0)


def _wait_or_kill(child: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        child.wait(seconds)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _end(pids: Collection[int]) -> set[int]:
    """Send SIGTERM, and after a grace SIGKILL, to children of this process, and reap them.

    Returns:
        the children that this user may not signal (sudo, for instance). They are not waited for.
    """
    left, forbidden = set(pids), set[int]()
    for number, patience in ((signal.SIGTERM, _MOMENT_S), (signal.SIGKILL, 10 * _MOMENT_S)):
        for pid in left:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass
            except PermissionError:
                forbidden.add(pid)
        left -= forbidden
        deadline = Deadline(patience)
        while left and not deadline.passed():
            left -= {pid for pid in left if _collected(pid)}
            if left:
                time.sleep(0.01)
    return forbidden


def _collected(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def state_and_parent(pid: int) -> tuple[str, int]:
    """Return a process's state (the letter in /proc) and its parent.

    They are "" and 0 if there is no such process, or it cannot be read.
    """
    try:
        # The name, in brackets, may contain any character. State and parent follow the last bracket.
        state, parent, *_ = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return "", 0
    return state, int(parent)


def _children() -> list[int]:
    """Return the direct children of this process, including zombies."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if state_and_parent(pid)[1] == os.getpid()]


def _prctl(option: int, value: int) -> None:
    """Call prctl, on Linux only. On other systems a job runs, but some processes may remain after a kill -9."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _prepare_child() -> None:
    """Prepare the child process before it runs mpirun.

    It gets its own process group, and SIGTERM if this process is killed with SIGKILL.
    """
    os.setpgid(0, 0)
    end_with_parent()


def end_with_parent() -> None:
    """Request SIGTERM for this process when its parent dies in any way."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
