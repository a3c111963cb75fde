"""Runs mpirun to its end, hands signals on, and leaves no process behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import BinaryIO

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_GRACE_S = 1.0
# Signals that mean "stop the job". SIGHUP: the terminal has gone.
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def supervise(
    words: Sequence[str],
    environment: Mapping[str, str],
    timeout: float | None = None,
    output: BinaryIO | None = None,
    inherited: Sequence[int] = (),
) -> int:
    """Runs a launcher with our stdin, and our stdout and stderr unless `output` is given, which gets both.

    It inherits the descriptors in `inherited` as well.

    Returns:
        the launcher's exit status; 128 + N if signal N ended it, or if signal N reached this process and the
        launcher failed after it; 124 if `timeout` seconds were not enough.
    """
    with subreaper():
        # A process group of its own: Ctrl-C in a terminal reaches this process only, which hands it on once. Two
        # interrupts at once would make mpirun give up without clearing away its ranks.
        child = subprocess.Popen(
            words, env=environment, stdout=output, stderr=output, pass_fds=inherited, preexec_fn=_prepare_child
        )
        received: list[int] = []

        def forward(number: int, _frame: FrameType | None) -> None:
            received.append(number)
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(number)

        with _handlers(forward):
            try:
                status = child.wait(timeout)
            except subprocess.TimeoutExpired:
                child.terminate()
                _wait_or_kill(child)
                return 124
    if status < 0:
        return 128 - status
    return 128 + received[0] if status != 0 and received else status


@contextlib.contextmanager
def subreaper() -> Iterator[None]:
    """Adopts the processes whose parents die within the block, and ends those that are left when it ends.

    When mpirun is killed, its ranks (and their data loaders) would be nobody's children and live on.
    """
    before = set(_children())
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        # What an orphan leaves becomes ours only when the orphan is dead: look again until none comes, in ten
        # generations at most, so that a process that even SIGKILL does not end (a dead disk) cannot hold us.
        for _ in range(10):
            if not (left := [pid for pid in _children() if pid not in before]):
                break
            _end(left)
        _prctl(_PR_SET_CHILD_SUBREAPER, 0)


def _wait_or_kill(child: subprocess.Popen[bytes]) -> None:
    try:
        child.wait(5 * _GRACE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _end(pids: Sequence[int]) -> None:
    """SIGTERM, and after a grace SIGKILL, to children of ours; collects them."""
    left = set(pids)
    for number, patience in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, 10 * _GRACE_S)):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + patience
        while left and time.monotonic() < deadline:
            left -= {pid for pid in left if _collected(pid)}
            if left:
                time.sleep(0.01)


def _collected(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def _children() -> list[int]:
    """Our direct children, dead ones that nobody has collected included."""
    me = str(os.getpid())
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # The name, in brackets, may hold anything; the state and the parent follow the last bracket.
                if (entry / "stat").read_text().rpartition(")")[2].split()[1] == me:
                    found.append(int(entry.name))
    return found


@contextlib.contextmanager
def _handlers(handler: object) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old = {number: signal.signal(number, handler) for number in _FORWARDED}  # type: ignore[arg-type]
    try:
        yield
    finally:
        for number, previous in old.items():
            signal.signal(number, previous)


def _prctl(option: int, value: int) -> None:
    """Linux only; elsewhere the job runs as well, with less tidying up after a kill -9."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _prepare_child() -> None:
    """In the child, before mpirun: a group of its own, and SIGTERM for it if this process is killed with SIGKILL."""
    os.setpgid(0, 0)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
