"""Descriptors of a launcher: the number that it may have, complete writes, messages, and outputs of ranks."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import sys
import termios
from collections.abc import Iterator

from sordino.errors import UsageError


@contextlib.contextmanager
def allowed(needed: int, users: str) -> Iterator[None]:
    """Let this process open `needed` files within the block.

    Args:
        needed: number of files.
        users: what needs them, for the error.

    Raises:
        UsageError: the hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UsageError(
            f"{users} need {needed} open files, but the limit is {hard}. Start fewer, or raise the hard limit (ulimit "
            "-Hn; nofile in /etc/security/limits.conf)"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def write(descriptor: int, data: bytes) -> None:
    """Write all data, even if another process has made the pipe or the terminal non-blocking.

    If the reader is gone, the data are lost, as with mpirun.
    """
    writable = select.poll()
    writable.register(descriptor, select.POLLOUT)
    with contextlib.suppress(OSError):
        while data:
            try:
                data = data[os.write(descriptor, data) :]
            except BlockingIOError:
                writable.poll()


def say(text: str) -> None:
    """Print a message of `sordino run` on stderr. It is lost if stderr cannot be written, as output of ranks is."""
    with contextlib.suppress(OSError):
        print(f"sordino run: {text}", file=sys.stderr, flush=True)


def output_pair() -> tuple[int, int]:
    """Return the descriptors to read and to write the stdout of a rank.

    They are the ends of a pseudo-terminal, so that programs write line by line, or of a pipe if the system has no
    pseudo-terminal left.
    """
    try:
        reading, writing = os.openpty()
    except OSError:
        return os.pipe()
    _make_raw(writing)
    return reading, writing


def _make_raw(terminal: int) -> None:
    """Make a pseudo-terminal pass on bytes unchanged."""
    attributes = termios.tcgetattr(terminal)
    attributes[1] &= ~termios.OPOST
    attributes[3] &= ~termios.ECHO
    termios.tcsetattr(terminal, termios.TCSANOW, attributes)
