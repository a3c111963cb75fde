"""One start of a job, by mpirun or by `sordino run` itself: the folder of its files, and its result."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from sordino.launcher import descriptors, mpi, outcomes
from sordino.launcher.local import LocalJob
from sordino.launcher.outcomes import Deadlines, Outcomes
from sordino.launcher.processes import Ended, StopSignals, supervise
from sordino.launcher.scratch import scratch

# Open MPI's shared memory takes 16 MiB per rank. If it does not fit, a rank that uses it dies of SIGBUS.
_BYTES_PER_RANK = 17 << 20


@dataclass(frozen=True)
class JobFolder:
    """A folder for a job's files on this machine, and a descriptor that holds its lock."""

    folder: Path
    lock: int

    def clear(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def job_folder() -> Iterator[JobFolder]:
    """Yield the folder of a job that is started without mpirun. It gets some links and a socket."""
    shm = Path("/dev/shm")
    with scratch(shm if os.access(shm, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())) as (folder, lock):
        yield JobFolder(folder, lock)


def start_locally(
    job: mpi.Job,
    environment: Mapping[str, str],
    place: JobFolder,
    survives_losses: bool,
    stop: StopSignals,
    timeout: float | None = None,
    output: BinaryIO | None = None,
    respawns: int = 0,
) -> Ended:
    """Run a job on this machine to its end, without mpirun.

    Args:
        job: the job.
        environment: environment of the ranks.
        place: folder for the job's files.
        survives_losses: whether ranks survive losses.
        stop: signals that are passed to the ranks.
        timeout: limit in seconds; None: no limit.
        output: file for stdout and stderr; None: those of this process.
        respawns: largest number of ranks that are replaced in the running job.

    Returns:
        the end of the job, as from `supervise`.
    """
    variables = {**environment, **(job.exports or {})}
    with _subfolder(place.folder) as folder:
        words = mpi.resolve(job.command)
        made = LocalJob(job.ranks, words, variables, folder, survives_losses, _deadlines(variables), output, respawns)
        return made.run(stop, timeout)


@contextlib.contextmanager
def place_for(launcher: mpi.Launcher, job: mpi.Job) -> Iterator[JobFolder | None]:
    """Yield the folder of a job that mpirun starts.

    It is None if the launcher has no options for it, or may use other hosts, which would not have the folder.

    A killed mpirun leaves its session files and 16 MiB of shared memory for each rank. So these files go to a folder
    that is removed.
    """
    if launcher.family != "openmpi" or job.spreads:
        yield None
        return
    with scratch(_base(job.ranks)) as (folder, lock):
        yield JobFolder(folder, lock)


def _base(ranks: int) -> Path:
    shm, other = Path("/dev/shm"), Path(tempfile.gettempdir())
    if not os.access(shm, os.W_OK | os.X_OK):
        return other
    room = os.statvfs(shm)
    free, needed = room.f_bavail * room.f_frsize, ranks * _BYTES_PER_RANK
    if room.f_blocks and free < needed:  # a tmpfs without a limit reports 0 blocks
        text = f"{shm} has {free >> 10:,} KiB free, but {ranks} ranks of Open MPI need {needed >> 10:,} KiB"
        descriptors.say(f"{text}; their shared memory is in {other}")
        return other
    return shm


def start(
    launcher: mpi.Launcher,
    job: mpi.Job,
    environment: Mapping[str, str],
    place: JobFolder | None,
    stop: StopSignals,
    timeout: float | None = None,
    output: BinaryIO | None = None,
) -> Ended:
    """Run a job by mpirun to its end, and remove its files on this machine. See `supervise` and `start_locally`."""
    with contextlib.ExitStack() as stack:
        variables = dict(environment)
        folder = None
        if place is not None:
            folder = stack.enter_context(_subfolder(place.folder))
            variables.setdefault("OMPI_MCA_btl_sm_backing_directory", str(folder))
            variables.setdefault("PRTE_MCA_prte_local_tmpdir_base", str(folder))

        def run(job: mpi.Job, reports: Outcomes | None = None, errors: int | None = None) -> Ended:
            words, over = mpi.command_line(launcher, job, variables), reports.over if reports else None
            inherited = (place.lock,) if place else ()
            return supervise(words, variables, stop, timeout, output, errors, inherited, over)

        deadlines = _deadlines({**environment, **(job.exports or {})})
        if folder is not None:
            reports, where = outcomes.in_folder(job.ranks, folder / "outcomes", job.fault_tolerant, deadlines)
            variables["SORDINO_LAUNCHER"] = where
            return _judged(run(_kept(job, where) if job.fault_tolerant else job, reports), reports)
        if not job.fault_tolerant:
            return run(job)
        with outcomes.over_stderr(job.ranks, deadlines) as (reports, where, errors):
            ended = run(_kept(job, where), reports, errors)
        return _judged(ended, reports)


def _deadlines(environment: Mapping[str, str]) -> Deadlines:
    """Return the deadlines of the ranks (csrc/base/config.cc). Ranks refuse a bad number, so it is ignored here."""

    def seconds(default: float, *names: str) -> float:
        text = next((environment[name] for name in names if name in environment), "")
        with contextlib.suppress(ValueError):
            return float(text)
        return default

    standard = Deadlines()
    return Deadlines(
        start=seconds(standard.start, "SORDINO_TIMEOUT_S"),
        warning=seconds(standard.warning, "SORDINO_STALL_WARN_S", "HOROVOD_STALL_CHECK_TIME_SECONDS"),
    )


def _kept(job: mpi.Job, where: str) -> mpi.Job:
    return replace(job, command=[*outcomes.supervisor(where), *mpi.resolve(job.command)])


@contextlib.contextmanager
def _subfolder(folder: Path) -> Iterator[Path]:
    """Make a subfolder for one start, and remove it."""
    folder.mkdir(parents=True, exist_ok=True)  # another program may have removed it since the last start
    made = Path(tempfile.mkdtemp(dir=folder))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _judged(ended: Ended, reports: Outcomes) -> Ended:
    """Return mpirun's end, with the status that follows from the ranks' outcomes."""
    if ended.killed:
        return ended
    status, why = reports.judge(ended.status)
    if ended.stopped and status not in (0, ended.status):
        return replace(ended, status=128 + ended.stopped)
    if why:
        descriptors.say(why)
    return replace(ended, status=status, why=why)
