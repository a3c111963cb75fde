"""Jobs of tests: their processes, their open files, and whether anything remains after their end. Fixtures select what
starts a job's ranks: `sordino run` itself, or mpirun."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from checks.commands import SORDINO
from pace import HANG_S

from drills.job import is_locked

if TYPE_CHECKING:
    from typing import Self

MARK = "DRILL"  # in the environment of all processes that the job starts


def eventually(condition: Callable[[], bool], seconds: float) -> bool:
    limit = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > limit:
            return False
        time.sleep(0.02)
    return True


class Started:
    """A command in a session of its own, and the processes that it starts. The end of the block kills all of them.

    Args:
        folder: folder for the output.
        command: words of the command.
        variables: additional environment variables. SORDINO_* and HOROVOD_* are not inherited.
    """

    def __init__(self, folder: Path, command: Sequence[str], variables: Mapping[str, str] | None = None) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("SORDINO_", "HOROVOD_"))}
        self._mark = f"{MARK}={uuid.uuid4().hex}"
        self._output = folder / f"output.{uuid.uuid4().hex}"
        self.files: set[Path] = set()
        with open(self._output, "wb") as output:
            self.front = subprocess.Popen(
                command,
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                env={**clean, **(variables or {}), MARK: self._mark.partition("=")[2]},
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.processes():
            self.send(pid, signal.SIGKILL)
        self.front.wait(HANG_S)
        for file in self.files:  # the job leaves these if no process is left to remove them
            for folder in (file, *file.parents):
                if folder.name.startswith("sordino-run-") and not is_locked(folder):
                    shutil.rmtree(folder, ignore_errors=True)

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def processes(self) -> dict[int, dict[str, str]]:
        """Return the initial environments of the job's living processes, by process number."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    text = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
                    dead = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
                except OSError:  # the process has just ended
                    continue
                if self._mark in text and not dead:
                    found[int(entry.name)] = dict(word.split("=", 1) for word in text if "=" in word)
        return found

    def wait_for(self, condition: Callable[[], bool], seconds: float = HANG_S) -> None:
        """Wait until the condition holds. Meanwhile, note the files that the job uses."""

        def holds() -> bool:
            self._remember()
            return condition()

        over = eventually(lambda: holds() or self.front.poll() is not None, seconds)
        assert over, f"not within {seconds} s\n{self.output}"
        assert condition(), f"over with {self.front.returncode} before that\n{self.output}"

    def _remember(self) -> None:
        """Note the files in /dev/shm and in the folder for temporary files that the job has open or mapped, or that its
        environment names."""
        folders = ("/dev/shm/", f"{tempfile.gettempdir()}/sordino-run-", f"{tempfile.gettempdir()}/ompi")
        for pid, environ in self.processes().items():
            names = {environ.get("OMPI_MCA_btl_sm_backing_directory", "")}
            try:
                maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
                names |= {words[5] for line in maps if len(words := line.split(maxsplit=5)) == 6}
                names |= {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()}
            except OSError:
                continue
            self.files |= {Path(name) for name in names if name.startswith(folders) and "(deleted)" not in name}

    def send(self, pid: int, number: int) -> None:
        if self._mark.encode() in environ_of(pid):
            os.kill(pid, number)

    def ends(self, within: float = HANG_S) -> int:
        """Return the exit status. The command must end within this time, in seconds."""
        try:
            return self.front.wait(within)
        except subprocess.TimeoutExpired:
            left = {pid: words_of(pid) for pid in self.processes()}
            raise AssertionError(f"still there after {within} s: {left}\n{self.output}") from None

    def leaves_nothing(self) -> None:
        self.leaves_no_process()
        left = [file for file in self.files if file.exists() and not is_locked(file)]
        assert not left, f"left behind: {left}\n{self.output}"

    def leaves_no_process(self) -> None:
        gone = eventually(lambda: not self.processes(), HANG_S)
        assert gone, f"left behind: { {pid: words_of(pid) for pid in self.processes()} }\n{self.output}"


class Launched(Started):
    """`BEFORE sordino run WORDS`."""

    starter = "local"  # or "mpi", or "hosts"; set by the fixtures

    def __init__(self, folder: Path, words: Sequence[str], before: Sequence[str] = ()) -> None:
        by = ["--launcher", "local" if self.starter == "local" else "mpi"]
        if self.starter == "hosts":
            by += ["--hosts", f"localhost:{words[words.index('-np') + 1]}"]
        super().__init__(folder, [*before, *SORDINO, "run", *by, *words])

    def _find(self, condition: Callable[[int, str, dict[str, str]], bool]) -> list[int]:
        processes = self.processes()
        return [pid for pid, environ in processes.items() if condition(pid, words_of(pid), environ)]

    def copy(self) -> int:
        """Return the process that does the work of `sordino run`: a copy of the one that was started."""
        (pid,) = self._find(lambda pid, words, environ: pid != self.front.pid and "sordino.cli run" in words)
        return pid

    def mpirun(self) -> int:
        (pid,) = self._find(lambda pid, words, environ: re.match(r"\S*(mpirun|prterun) ", words) is not None)
        return pid

    def rank(self, number: int) -> int:
        """Return the rank's process, and not its supervisor, its stand-in (tests/forked), or a child of it."""
        here = self._find(
            lambda pid, words, environ: (
                environ.get("SORDINO_RANK", environ.get("OMPI_COMM_WORLD_RANK")) == str(number)
                and "supervisor.py" not in words
                and "forked/client.py" not in words
            )
        )
        (pid,) = [pid for pid in here if parent_of(pid) not in here]
        return pid


def own_mounts(script: str, *words: str) -> list[str]:
    """Return words to put before a command, to run it with its own mounts. The shell script `script` takes `words` as
    $1, $2, ..., shifts them away, makes the mounts, and runs "$@". Skips the test if mounts are not allowed."""
    try:
        subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs unshare, and the right to mount: {error}")
    return ["unshare", "-m", "sh", "-c", script, "sh", *words]


def words_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def environ_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _start_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, starter: str) -> str:
    if starter != "local" and request.getfixturevalue("launcher").family != "openmpi":
        pytest.skip("written for Open MPI's launcher")
    monkeypatch.setattr(Launched, "starter", starter)
    return starter


@pytest.fixture(params=["local", "mpi"])
def starter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Start ranks with each launcher. `make test` runs a drill with one of them, chosen by its class
    (tests/selection.py)."""
    return _start_by(request, monkeypatch, request.param)


@pytest.fixture(params=["local", "mpi", "hosts"])
def starter_anywhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Start ranks with each launcher, and with mpirun and a list of hosts."""
    return _start_by(request, monkeypatch, request.param)


@pytest.fixture
def by_mpirun(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start ranks with mpirun only."""
    _start_by(request, monkeypatch, "mpi")
