"""Plants one error after the other into a copy of the tree, and tells which tests catch it.

    python tests/planted/plant.py [WORDS...] [--tier all] [--json FILE]

Words choose errors by their names and files. The copy and what is built of it stay in build/planted, so that the next
run compiles only what has changed since. Status 1 if fewer than 95 % of the errors are caught.
"""

from __future__ import annotations

import argparse
import json
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
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from planted.catalogue import ERRORS  # noqa: E402
from planted.error import Error  # noqa: E402
from sordino.report import machines  # noqa: E402

LEAST = 0.95  # of the errors are to be caught
HANG_S = 20  # after which an operation that waits for others fails
BUILD_S = 3600
SPARE_S = 60  # what a command may take beside four times what it takes without an error
LIBRARIES = "_core*.so", "libsordino*.so"


@dataclass
class Outcome:
    """Of one command, or of all that are to catch an error."""

    caught: bool
    by: str
    seconds: float = 0.0


class Commands:
    """Runs commands in the copy, and ends them with all that they have started."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._folder, self._environment = folder, environment

    def run(self, words: Sequence[str], limit: float) -> tuple[int | None, str]:
        """The status and what it has printed; None where it has not ended in `limit` seconds."""
        process = subprocess.Popen(
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
            return process.returncode, printed
        except subprocess.TimeoutExpired:
            return None, ""
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class Copy:
    """The tree once more, with what is built of it."""

    def __init__(self, home: Path, tier: str) -> None:
        self.root, self.tree, self.tier = home / "copy", home / "tree", tier
        programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        self.commands = Commands(
            self.root,
            {
                **os.environ,
                "PATH": programs,
                "PYTHONPATH": str(self.root / "python"),
                "SORDINO_TIMEOUT_S": str(HANG_S),
                "SORDINO_CPP_TESTS": str(self.tree / "tests" / "cpp"),
                "CI": "1",  # the same examples in every run
            },
        )
        self._stale = True  # what is built is not what the sources say

    def refresh(self) -> None:
        """Takes over what has changed, leaving all else untouched, and builds it."""
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
            }
            self._must(
                ["cmake", "-G", "Ninja", "-S", str(self.root), "-B", str(self.tree)]
                + [f"-D{name}={value}" for name, value in settings.items()]
            )
        self._must(["cmake", "--build", str(self.tree), "--parallel", str(os.cpu_count() or 1)])
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
        """Within it the copy has the error, which may have to be compiled yet."""
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
        """Builds what these commands use; False if something does not compile."""
        if not self._stale:
            return True
        targets = [words.removeprefix("cpp.") for words in commands if is_native(words)]
        if len(targets) < len(commands):
            targets += ["_core", "fake_nccl"]  # and what they use
            halves = "sordino_mpi_openmpi", "sordino_mpi_mpich", "sordino_ucx"
            targets += [name for name in halves if (self.tree / f"lib{name}.so").is_file()]
        words = ["cmake", "--build", str(self.tree), "--parallel", str(os.cpu_count() or 1), "--target", *targets]
        status, _ = self.commands.run(words, BUILD_S)
        return status == 0

    def test(self, command: str, limit: float) -> Outcome:
        """Runs one command of those that are to catch an error."""
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
    """Whether it is a test of ctest."""
    return command.startswith("cpp.")


def try_sound(copy: Copy, errors: Sequence[Error]) -> dict[str, float]:
    """How long each command takes without an error. None may fail."""
    took = {}
    for command in dict.fromkeys(command for error in errors for command in error.caught_by):
        outcome = copy.test(command, 600)
        print(f"without an error   {outcome.seconds:6.1f} s  {command}", flush=True)
        if outcome.caught:
            raise SystemExit(f"this fails without an error: {command}\n  {outcome.by}")
        took[command] = outcome.seconds
    return took


def try_error(copy: Copy, error: Error, took: dict[str, float]) -> Outcome:
    """Whether an error is caught, and by what."""
    began = time.monotonic()
    with copy.planted(error):
        if not copy.build(error.caught_by):
            return Outcome(False, "it does not compile, and is no error that could be made", time.monotonic() - began)
        found = Outcome(False, "")
        for command in error.caught_by:
            found = copy.test(command, SPARE_S + 4 * took[command])
            if found.caught:
                break
    return Outcome(found.caught, found.by, time.monotonic() - began)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("words", nargs="*", help="only errors with one of these in their names or files")
    parser.add_argument("--tier", choices=("quick", "all"), default="quick", help="of the tests (tests/selection.py)")
    parser.add_argument("--json", type=Path, help="where to write what was found")
    options = parser.parse_args()
    chosen = options.words or [""]
    errors = [error for error in ERRORS if any(word in error.name or word in error.file for word in chosen)]
    if not errors:
        raise SystemExit("no error has such a name")
    # Those of one file come one after the other, so that each costs one compilation; then those without any.
    errors.sort(key=lambda error: (not error.native, error.file))
    copy = Copy(ROOT / "build" / "planted", options.tier)
    copy.refresh()
    took = try_sound(copy, errors)
    outcomes: list[tuple[Error, Outcome]] = []
    for error in errors:
        outcome = try_error(copy, error, took)
        outcomes.append((error, outcome))
        verdict = "caught" if outcome.caught else "NOT caught"
        print(f"{verdict:10} {outcome.seconds:6.1f} s  {error.name} ({error.kind}): {outcome.by}", flush=True)
    caught = sum(outcome.caught for _, outcome in outcomes)
    share = caught / len(errors)
    print(f"{caught} of {len(errors)} errors are caught: {share:.0%}")
    for error, outcome in outcomes:
        if not outcome.caught:
            print(f"NOT caught: {error.name}, in {error.file}")
    if options.json is not None:
        told = [
            {"name": error.name, "kind": error.kind, "file": error.file, **asdict(outcome)}
            for error, outcome in outcomes
        ]
        found = {"benchmark": "planted", "machine": {"commit": machines.commit()}, "caught": caught, "of": len(errors)}
        options.json.write_text(json.dumps({**found, "errors": told}, indent=1) + "\n")
    return 0 if share >= LEAST else 1


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # the former is ignored in the background of a script
        signal.signal(number, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
