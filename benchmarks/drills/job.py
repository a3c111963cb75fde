"""A job of `sordino run` whose ranks are killed. A mark in the environment identifies its processes."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sordino.errors import SordinoError
from sordino.launcher.processes import state_and_parent
from sordino.report import machines

_MARK = "SORDINO_SOAK_JOB"
_RANK = ("SORDINO_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_LOOK_S = 1.0
_GOES_WITHIN_S = 5.0


@dataclass(frozen=True)
class Kill:
    """Ranks that were killed at once.

    Attributes:
        time: seconds since the epoch.
        ranks: killed ranks, as the launcher numbers them.
        alive: number of living ranks before the kill.
        start: number of restarts of the job before the kill.
    """

    time: float
    ranks: tuple[int, ...]
    alive: int
    start: int


class Job:
    """`sordino run WORDS` in its own session. The end of the `with` block kills it.

    Args:
        folder: new folder for the output and for temporary files, which the job must remove.
        words: words of the command.
    """

    def __init__(self, folder: Path, words: Sequence[str]) -> None:
        folder.mkdir()
        self._temporary = folder / "tmp"
        self._temporary.mkdir()
        self._output = folder / "output"
        self._files: set[Path] = set()
        mark = uuid.uuid4().hex
        self._mark = f"{_MARK}={mark}".encode()
        self.begun = time.time()
        environment = {**os.environ, _MARK: mark, "TMPDIR": str(self._temporary)}
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "torch")  # torch leaves files there
        with open(self._output, "wb") as output:
            self._front = subprocess.Popen(
                [sys.executable, "-m", "sordino.cli", "run", *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self._processes():
            self._kill(pid)
        self._front.wait()

    @property
    def output(self) -> str:
        """Output of the command and all ranks."""
        return self._output.read_text(errors="replace")

    def wait(self, until: float) -> int | None:
        """Wait for the end of the job, at most until `until` (of `time.time()`); return its exit status, or None."""
        while True:
            self._remember()
            left = until - time.time()
            try:
                return self._front.wait(min(max(left, 0), _LOOK_S))
            except subprocess.TimeoutExpired:
                if left <= _LOOK_S:
                    return None

    def ranks(self) -> dict[int, tuple[int, int]]:
        """Return the process id of each living rank, and the restarts before it, by rank."""
        here = {}
        for pid, environment in self._processes().items():
            number = next((environment[name] for name in _RANK if name in environment), None)
            if number is not None and b"supervisor.py" not in _read(pid, "cmdline"):
                here[pid] = int(number), int(environment.get("SORDINO_RESTART", 0))
        # Children of a rank have its environment too.
        return {rank: (pid, start) for pid, (rank, start) in here.items() if state_and_parent(pid)[1] not in here}

    def kill(self, ranks: dict[int, tuple[int, int]], victims: Sequence[int]) -> Kill:
        """Send SIGKILL to some of these ranks."""
        now = time.time()
        for rank in victims:
            self._kill(ranks[rank][0])
        return Kill(now, tuple(victims), len(ranks), max(start for _, start in ranks.values()))

    def left(self) -> list[str]:
        """Return what a job that has ended left behind: processes, files in shared memory, temporary files."""
        until = time.monotonic() + _GOES_WITHIN_S
        while (processes := self._processes()) and time.monotonic() < until:
            time.sleep(0.05)
        found = [f"process {_words(pid)}" for pid in processes]
        found += [str(file) for file in sorted(self._files) if file.exists() and not is_locked(file)]
        return found + [str(file) for file in sorted(self._temporary.iterdir())]

    def stuck(self, what: str) -> SordinoError:
        """Return an error that shows the processes and the output of the job."""
        commands = map(_words, self._processes())
        text = "\n".join([f"{what}; its processes:", *commands, "and the end of its output:", self.output[-2000:]])
        return SordinoError(machines.without_paths(text))

    def _processes(self) -> dict[int, dict[str, str]]:
        """Return the environments of the job's living processes, by process id."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                pid = int(entry.name)
                words = _read(pid, "environ").split(b"\0")
                if self._mark in words and state_and_parent(pid)[0] not in ("Z", "X", ""):
                    texts = [word.decode(errors="replace") for word in words if b"=" in word]
                    found[pid] = dict(text.split("=", 1) for text in texts)
        return found

    def _kill(self, pid: int) -> None:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        try:
            # The id may belong to another process by now; the handle does not.
            if self._mark in _read(pid, "environ").split(b"\0"):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        except ProcessLookupError:
            pass
        finally:
            os.close(handle)

    def _remember(self) -> None:
        """Note the files in shared memory that the job's processes have open or mapped."""
        for pid in self._processes():
            names = {line.split(maxsplit=5)[-1] for line in _read(pid, "maps").decode(errors="replace").splitlines()}
            try:
                names |= {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()}
            except OSError:  # the process has just ended
                continue
            shared = {name for name in names if name.startswith("/dev/shm/") and not name.endswith(" (deleted)")}
            self._files |= {Path(name) for name in shared}


def is_locked(folder: Path) -> bool:
    """Return whether a running job holds the lock of this folder (`sordino.launcher.scratch`).

    A launcher opens the folders of other jobs to see whether they have ended.
    """
    if not folder.is_dir():
        return False
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:  # the process has just ended, or is another user's
        return b""


def _words(pid: int) -> str:
    return _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace")
