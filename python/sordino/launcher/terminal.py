"""Input at a terminal for a job, whose processes are in the background of that terminal.

A process in the background is stopped when it reads from its terminal. So the first process of `sordino run`, which is
in the foreground, reads the lines and passes them through a pipe to stdin of the job, as mpirun does. While it is in
the background itself, it leaves the input to the shell.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from typing import Any

from sordino.launcher.processes import descriptor_of_end

_STDIN = 0
_REST_S = 0.5  # between two attempts to read while this process is in the background


class Input:
    """Context manager with the pipe for the input. It does nothing if stdin is not a terminal."""

    def __init__(self) -> None:
        self._pipe: list[int] | None = None
        self._before: Any = None

    def __enter__(self) -> Input:
        if os.isatty(_STDIN) and threading.current_thread() is threading.main_thread():
            self._pipe = [*os.pipe()]
            # Then read() in the background raises OSError, instead of stopping this process.
            self._before = signal.signal(signal.SIGTTIN, signal.SIG_IGN)
        return self

    def __exit__(self, *_: object) -> None:
        if self._pipe is not None:
            signal.signal(signal.SIGTTIN, self._before)
            while self._pipe:
                os.close(self._pipe.pop())

    def take_place_of_stdin(self) -> None:
        """Make the pipe stdin of this process, which is a child of the one that reads from the terminal."""
        if self._pipe is not None:
            os.dup2(self._pipe[0], _STDIN)
            while self._pipe:
                os.close(self._pipe.pop())
            signal.signal(signal.SIGTTIN, self._before)

    def pass_on_until_the_end_of(self, child: int) -> None:
        """Pass on input until this child has ended. Return at once if stdin is not a terminal."""
        if self._pipe is None:
            return
        os.close(self._pipe.pop(0))
        os.set_blocking(self._pipe[0], False)
        end = descriptor_of_end(child)
        try:
            _pass_on(self._pipe, end)
        finally:
            os.close(end)


def _pass_on(pipe: list[int], end: int) -> None:
    """Pass on input from the terminal to the pipe, until `end` is readable. Closes the pipe at the end of input."""
    (writing,) = pipe
    held, more, rests = b"", True, False
    while True:
        awaited = select.poll()
        awaited.register(end, select.POLLIN)
        if held:
            awaited.register(writing, select.POLLOUT)  # no input is taken that the job may never read
        elif more and not rests:
            awaited.register(_STDIN, select.POLLIN)
        found = [descriptor for descriptor, _ in awaited.poll(_REST_S * 1000 if rests else None)]
        if end in found:
            return
        rests = False
        if writing in found:
            try:
                held = held[os.write(writing, held) :]
            except BrokenPipeError:
                held, more = b"", False
        elif _STDIN in found:
            try:
                held = os.read(_STDIN, 4096)
            except OSError:  # in the background
                rests = True
                continue
            if not held:  # Ctrl-D
                more = False
                os.close(pipe.pop())
