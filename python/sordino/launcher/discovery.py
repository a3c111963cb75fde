"""Hosts of an elastic job, as a user's script prints them, and the slots of its processes.

The script prints a line `name:slots` (or `name`, for one slot) for each host that may have processes now. Hosts get
processes in the order of the lines.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from sordino.awake import AwakeClock
from sordino.errors import UsageError
from sordino.launcher.restarts import next_wait

_EVERY_S = 1.0
_LONGEST_S = 60.0  # time limit of the script
_KILLED_S = 0.5  # time to wait for its end after SIGKILL


@dataclass(frozen=True)
class Host:
    """A host, and the number of processes that it may have."""

    name: str
    slots: int


@dataclass(frozen=True, order=True)
class Slot:
    """Place of one process: the name of its host, and a number from 0."""

    host: str
    number: int


def parse(text: str) -> list[Host]:
    """Return the hosts in a script's output.

    Raises:
        ValueError: a line is neither empty nor a host, or a host is there twice.
    """
    hosts: dict[str, Host] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        found = re.fullmatch(r"([\w.-]+|\[[\da-fA-F:.]+\])(?::(\d+))?", line)
        if found is None or line.startswith("-"):
            raise ValueError(f"{line!r} is neither NAME nor NAME:SLOTS")
        name = found[1].strip("[]")
        if name in hosts:
            raise ValueError(f"{name} is there twice")
        hosts[name] = Host(name, int(found[2] or 1))
    return [host for host in hosts.values() if host.slots > 0]


def surplus(hosts: Iterable[Host], taken: Iterable[Slot]) -> list[Slot]:
    """Return the taken slots that the hosts no longer have."""
    slots = {host.name: host.slots for host in hosts}
    return [slot for slot in taken if slot.number >= slots.get(slot.host, 0)]


@dataclass
class Cooldowns:
    """Waiting times of hosts. If a process fails soon after its start, its host gets none for 1 s, 2 s, ... 60 s."""

    _until: dict[str, float] = field(default_factory=dict)
    _wait: dict[str, float] = field(default_factory=dict)

    def failed(self, host: str, now: float, lived: float) -> None:
        """Note that a process has failed on a host, `lived` seconds after its start."""
        self._wait[host] = next_wait(self._wait.get(host, 0.0), lived)
        self._until[host] = max(now + self._wait[host], self._until.get(host, 0.0))

    def over(self, host: str, now: float) -> bool:
        """Return whether the host may get a process."""
        return now >= self._until.get(host, now)


def free(hosts: Sequence[Host], taken: Iterable[Slot], cooldowns: Cooldowns, now: float) -> list[Slot]:
    """Return the slots that have no process and may get one, in the order of the hosts."""
    all_taken = set(taken)
    ready = [host for host in hosts if cooldowns.over(host.name, now)]
    slots = [Slot(host.name, number) for host in ready for number in range(host.slots)]
    return [slot for slot in slots if slot not in all_taken]


class Discovery:
    """Runs the script every second, in the background.

    Args:
        command: the script and its arguments, as in a shell.
    """

    def __init__(self, command: str) -> None:
        try:
            self._words = shlex.split(command)
        except ValueError as error:
            raise UsageError(f"--host-discovery-script: {error}") from error
        if not self._words:
            raise UsageError("--host-discovery-script: the name of the script is empty")
        self.hosts: list[Host] = []
        self.problem = "it has not ended yet"  # of the last run; "" if it went well
        self._clock = AwakeClock()
        self._next = 0.0
        self._running: subprocess.Popen[bytes] | None = None
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close())

    def look(self) -> str:
        """Start the script if it is time, and take the hosts from a run that has ended.

        Returns:
            a problem that the run before did not have; "" if there is none. After a problem, the hosts stay unchanged.
        """
        now = self._clock.now()
        if self._running is None and now >= self._next:
            self._begun, self._next = now, now + _EVERY_S
            return self._start()
        if self._running is None or (self._running.poll() is None and now - self._begun < _LONGEST_S):
            return ""
        return self._collect()

    def running(self) -> list[int]:
        """Return the process of a run that has not been collected."""
        return [] if self._running is None else [self._running.pid]

    def close(self) -> None:
        """End the current run, if there is one."""
        if self._running is not None:
            self._kill()
        self._output.close()

    def _start(self) -> str:
        self._output.seek(0)
        self._output.truncate()
        try:
            self._running = subprocess.Popen(
                self._words, stdin=subprocess.DEVNULL, stdout=self._output, start_new_session=True
            )
        except OSError as error:
            return self._note(f"{self._words[0]}: {error.strerror}")
        return ""

    def _collect(self) -> str:
        assert self._running is not None
        status = self._running.poll()
        self._kill()
        if status is None:
            return self._note(f"it has not ended within {_LONGEST_S:.0f} s")
        if status != 0:
            return self._note(f"it has ended with status {status}")
        self._output.seek(0)
        try:
            self.hosts = parse(self._output.read().decode(errors="replace"))
        except ValueError as error:
            return self._note(str(error))
        return self._note("")

    def _kill(self) -> None:
        assert self._running is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):  # a script may run under sudo
            os.killpg(self._running.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._running.wait(_KILLED_S)
        self._running = None

    def _note(self, problem: str) -> str:
        before, self.problem = self.problem, problem
        return problem if problem != before else ""
