"""Processes of a local launcher, whose output is passed on in complete lines."""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import subprocess
from collections.abc import Callable, Mapping

from sordino.launcher import descriptors
from sordino.launcher.processes import FOR_THE_PROGRAM, descriptor_of_end

_LONGEST_LINE = 1 << 16


class Rank:
    """One rank: its process, and its output that is not a complete line yet.

    Args:
        number: number of the rank in its job.
        process: its process, which leads a process group.
        events: selector for output and the end of the process. The data of an event is a function to call, or, at the
            end of the process, this object.
        outputs: by the descriptor of an output of the process: the descriptor to which its lines are written.
    """

    def __init__(
        self,
        number: int,
        process: subprocess.Popen[bytes],
        events: selectors.BaseSelector,
        outputs: Mapping[int, int],
    ) -> None:
        self.number, self.process, self._events = number, process, events
        self._end = descriptor_of_end(process.pid)
        self._streams: dict[int, tuple[int, bytes]] = {}  # target and held output, by the rank's descriptor
        for descriptor, target in outputs.items():
            fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_NONBLOCK)
            self._streams[descriptor] = target, b""
            events.register(descriptor, selectors.EVENT_READ, self._reader(descriptor))
        events.register(self._end, selectors.EVENT_READ, self)

    def send(self, number: int) -> None:
        """Send a signal to the rank's process group. A signal for the program goes to the rank only."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            (os.kill if number in FOR_THE_PROGRAM else os.killpg)(self.process.pid, number)

    def flush(self) -> None:
        """Write an incomplete line, such as a prompt."""
        for descriptor, (target, held) in self._streams.items():
            descriptors.write(target, held)
            self._streams[descriptor] = target, b""

    def finish(self) -> None:
        """Pass on the pending output of the process, which has ended. Later output of its children is lost."""
        for descriptor in list(self._streams):
            for _ in range(1 << 10):  # limited, because a child of the rank may still write
                if not self._read(descriptor):
                    break
        self.flush()
        self._events.unregister(self._end)
        os.close(self._end)
        self.close()

    def close(self) -> None:
        """Close the outputs."""
        for descriptor in list(self._streams):
            self._shut(descriptor)

    def _reader(self, descriptor: int) -> Callable[[], None]:
        def read() -> None:
            if self._read(descriptor) == b"":
                self._shut(descriptor)

        return read

    def _read(self, descriptor: int) -> bytes | None:
        """Pass on the rank's output in complete lines. Return the data: b"" at its end, None if there are none yet."""
        try:
            data = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return None
        except OSError:  # the end of a pseudo-terminal
            data = b""
        target, held = self._streams[descriptor]
        held += data
        cut = held.rfind(b"\n") + 1
        if not data or len(held) - cut > _LONGEST_LINE:
            cut = len(held)
        descriptors.write(target, held[:cut])
        self._streams[descriptor] = target, held[cut:]
        return data

    def _shut(self, descriptor: int) -> None:
        if self._streams.pop(descriptor, None) is not None:
            self._events.unregister(descriptor)
            os.close(descriptor)
