"""A copy of the source tree in which errors are planted, built, and tested."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from planted.error import Error

ROOT = Path(__file__).resolve().parents[2]
HANG_S = 20  # time after which an operation that waits for others fails
BUILD_S = 3600
LIBRARIES = "_core*.so", "libsordino*.so"


@dataclass
class Outcome:
    """Outcome of one command, or of all commands that are expected to catch an error.

    Attributes:
        caught: whether a command failed.
        by: the failed test and how it failed, or the reason why nothing could be tested.
        seconds: time for building and testing.
    """

    caught: bool
    by: str
    seconds: float = 0.0


class Stopped(Exception):
    """`Commands.stop()` was called."""


class Commands:
    """Commands in one copy, one at a time. When one ends, all processes that it has started are killed."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._folder, self._environment = folder, environment
        self._lock = Lock()
        self._running: subprocess.Popen[str] | None = None
        self._stopped = False

    def run(self, words: Sequence[str], limit: float) -> tuple[int | None, str]:
        """Return the status and the output; the status is None if the command did not end in `limit` seconds.

        Raises:
            Stopped: `stop()` was called before the command ended.
        """
        with self._lock:
            if self._stopped:
                raise Stopped
            self._running = process = subprocess.Popen(
                words,
                cwd=self._folder,
                env=self._environment,
                text=True,
                errors="replace",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            printed, _ = process.communicate(timeout=limit)
            status: int | None = process.returncode
        except subprocess.TimeoutExpired:
            status, printed = None, ""
        finally:
            with self._lock:
                self._running = None
                _kill(process)
            process.wait()
        if self._stopped:
            raise Stopped
        return status, printed

    def stop(self) -> None:
        """Kill the running command and start no other one. Any thread may call it."""
        with self._lock:
            self._stopped = True
            if self._running is not None:
                _kill(self._running)


def _kill(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


class Copy:
    """A copy of the source tree with its build, which compiles with `jobs` processes at once."""

    def __init__(self, home: Path, tier: str, jobs: int) -> None:
        self.root, self.tree, self.tier, self._jobs = home / "copy", home / "tree", tier, str(jobs)
        programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        self.commands = Commands(
            self.root,
            {
                **os.environ,
                "PATH": programs,
                "PYTHONPATH": str(self.root / "python"),
                "SORDINO_TIMEOUT_S": str(HANG_S),
                "SORDINO_CPP_TESTS": str(self.tree / "tests" / "cpp"),
                "CI": "1",  # the same Hypothesis examples in every run
            },
        )
        self._stale = True  # the build is older than the sources

    def refresh(self) -> None:
        """Copy the files that have changed, and build."""
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        names = {name for name in listed.split("\0") if name and (ROOT / name).is_file()}
        self.root.mkdir(parents=True, exist_ok=True)
        for old in list(self.root.rglob("*")):
            name = str(old.relative_to(self.root))
            ours = old.is_symlink() or not old.is_file() or "__pycache__" in name
            if not ours and name not in names:
                old.unlink()
        for name in names:
            here, there = ROOT / name, self.root / name
            if not there.is_file() or there.read_bytes() != here.read_bytes():
                there.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(here, there)
                shutil.copymode(here, there)
        configured = self.tree / "build.ninja"
        if not configured.is_file():
            pybind11 = subprocess.run(
                [sys.executable, "-m", "pybind11", "--cmakedir"], check=True, capture_output=True, text=True
            ).stdout.strip()
            settings = {
                "CMAKE_BUILD_TYPE": "Release",
                "Python_EXECUTABLE": sys.executable,
                "pybind11_DIR": pybind11,
                "SORDINO_TESTS": "ON",
                "SORDINO_CUDA": "OFF",
                # So that the stand-in for CUDA, which has a package of links to these libraries, finds its own.
                "CMAKE_BUILD_RPATH_USE_ORIGIN": "ON",
            }
            self._must(
                ["cmake", "-G", "Ninja", "-S", str(self.root), "-B", str(self.tree)]
                + [f"-D{name}={value}" for name, value in settings.items()]
            )
        self._must(["cmake", "--build", str(self.tree), "--parallel", self._jobs])
        for pattern in LIBRARIES:
            for library in self.tree.glob(pattern):
                link = self.root / "python" / "sordino" / library.name
                if not link.is_symlink():
                    link.symlink_to(library)
        self._stale = False

    def _must(self, words: list[str]) -> None:
        status, printed = self.commands.run(words, BUILD_S)
        if status != 0:
            what = f"took more than {BUILD_S} s" if status is None else f"failed:\n{printed[-4000:]}"
            raise SystemExit(f"{shlex.join(words)} {what}")

    @contextmanager
    def planted(self, error: Error) -> Iterator[None]:
        """Context in which the copy's source has the error; `build()` compiles it."""
        path = self.root / error.file
        before = path.read_text()
        after = error.plant(before)
        self._stale |= error.native
        try:
            path.write_text(after)
            yield
        finally:
            path.write_text(before)
            self._stale |= error.native

    def build(self, commands: Sequence[str]) -> bool:
        """Build everything that these commands use. Return whether it compiled."""
        if not self._stale:
            return True
        targets = [words.removeprefix("cpp.") for words in commands if is_native(words)]
        if len(targets) < len(commands):
            targets += ["_core", "fake_nccl"]  # libraries that the tests use
            halves = "sordino_mpi_openmpi", "sordino_mpi_mpich", "sordino_ucx"
            targets += [name for name in halves if (self.tree / f"lib{name}.so").is_file()]
            if (self.tree / "tests" / "cuda_on_cpu" / "plugin" / "libsordino_cuda.so").is_file():
                targets.append("sordino_cuda_on_cpu")
        words = ["cmake", "--build", str(self.tree), "--parallel", self._jobs, "--target", *targets]
        status, _ = self.commands.run(words, BUILD_S)
        return status == 0

    def test(self, command: str, limit: float) -> Outcome:
        """Run one of the commands that are expected to catch an error."""
        if is_native(command):
            words = ["ctest", "--test-dir", str(self.tree), "--no-tests=error", "-R", f"^{re.escape(command)}$"]
        else:
            words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tier", self.tier]
            words += shlex.split(command)
        began = time.monotonic()
        status, printed = self.commands.run(words, limit)
        seconds = time.monotonic() - began
        if status == 0:
            return Outcome(False, "", seconds)
        if status is None:
            return Outcome(True, f"{command}: hung", seconds)
        if status < 0:
            return Outcome(True, f"{command}: died of signal {-status}", seconds)
        failed = re.findall(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", printed, re.MULTILINE)
        told = failed[0] if failed and not is_native(command) else command
        if not failed and not is_native(command):
            told += ": " + (printed.strip().splitlines() or [""])[-1]
        return Outcome(True, told, seconds)


def is_native(command: str) -> bool:
    """Return whether a command is the name of a C++ test."""
    return command.startswith("cpp.")
