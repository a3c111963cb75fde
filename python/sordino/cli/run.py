"""Starts a program on several ranks: on this machine without MPI, on other machines by mpirun.

  sordino run -np 4 -- python train.py --epochs 2
  sordino run -np 4 --hosts node1:2,node2:2 -x NCCL_DEBUG=INFO -- python train.py
  sordino run -np 4 --respawn 3 -- python examples/elastic.py
  sordino run -np 4 --restarts 3 -- python examples/train.py --checkpoint saved/

`python` and `sordino` as the command mean those that run this command; write a path for another.
A machine has room for 4 ranks per core (at least 8; with --oversubscribe 64 per core), and one per 100 MiB of memory.
The exit status is that of the first rank that failed, or 128 + N if signal N ended it. Ctrl-C and SIGTERM are passed to
the ranks; processes that remain on this machine --grace seconds later are killed. Ctrl-Z stops the ranks until the
command is continued (`fg`, `bg`). SIGUSR1 and SIGUSR2 are only passed to the ranks. Rank 0 reads this command's input.
When the command returns, none of its processes on this machine remains.
With --on-peer-lost continue, or init(on_peer_lost="continue"), a rank that a signal ended is lost, and the other ranks
determine the exit status.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from sordino.cli import run_elastic
from sordino.errors import NotBuilt, UsageError
from sordino.launcher import capacity, jobs, mpi
from sordino.launcher.descriptors import say
from sordino.launcher.guard import guarded
from sordino.launcher.processes import GRACE_S, Ended, StopSignals
from sordino.launcher.restarts import repeat
from sordino.record.writing import Lines, job_file
from sordino.rendezvous.environment import (
    MIN_RANKS,
    NEWCOMER,
    ON_PEER_LOST,
    RANK,
    RANK_VARIABLES,
    RENDEZVOUS,
    SIZE,
    TOKEN,
)

_LONGEST_GRACE_S = 86400.0
_OF_THE_LAUNCHER = ("SORDINO_LAUNCHER", "SORDINO_RESTART", NEWCOMER, RANK, RANK_VARIABLES, RENDEZVOUS, SIZE, TOKEN)

Start = Callable[[int, StopSignals], Ended]
"""Function that starts the job for the n-th time, and returns when it has ended."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `sordino run`."""
    parser.usage = "sordino run -np N [options] -- COMMAND [ARGUMENT ...]"
    parser.add_argument("-np", "-n", dest="ranks", type=int, metavar="N", help="number of ranks (default: all slots)")
    parser.add_argument("--hosts", metavar="H1:SLOTS,H2:SLOTS", help="hosts of the ranks (default: this machine)")
    parser.add_argument(
        "--launcher", choices=("local", "mpi"),
        help="launcher of the ranks: local (this command itself; the default), or mpi (mpirun; the default with "
        "--hosts or --mpi-args)",
    )  # fmt: skip
    parser.add_argument("--oversubscribe", action="store_true", help="allow up to 64 ranks per core instead of 4")
    parser.add_argument(
        "-x", "--env", dest="env", action="append", default=[], metavar="NAME[=VALUE]",
        help="environment variable for all ranks; SORDINO_* and PYTHONPATH are always passed to all hosts",
    )  # fmt: skip
    parser.add_argument(
        "--restarts", type=int, default=0, metavar="N",
        help="largest number of restarts of all ranks after one fails; SORDINO_RESTART has the number of the start",
    )  # fmt: skip
    parser.add_argument(
        "--respawn", type=int, default=0, metavar="N",
        help="largest number of ranks that are replaced in the running job, which uses hvd.elastic.run; not with "
        "mpirun; implies --on-peer-lost continue",
    )  # fmt: skip
    parser.add_argument(
        "--on-peer-lost", choices=("raise", "continue"), metavar="raise|continue",
        help="behavior of the remaining ranks when a rank is lost (SORDINO_ON_PEER_LOST); with mpirun, continue needs "
        "Open MPI 5",
    )  # fmt: skip
    parser.add_argument(
        "--grace", type=float, default=GRACE_S, metavar="S",
        help=f"seconds from a signal that stops the job until remaining processes are killed (default {GRACE_S:g})",
    )  # fmt: skip
    parser.add_argument(
        "--record", metavar="DIR",
        help="folder for the records of the ranks, for `sordino report` (SORDINO_RECORD)",
    )  # fmt: skip
    parser.add_argument("--mpi-args", default="", metavar="OPTIONS", help="further options of mpirun, as one word")
    parser.add_argument("--verbose", action="store_true", help="print the command that starts the ranks")
    run_elastic.add_arguments(parser)
    parser.set_defaults(prefers_mpi=False)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="program and its arguments")


def main(options: argparse.Namespace) -> int:
    """Run the job to its end.

    Raises:
        UsageError: the options are invalid or contradict each other.
        NotBuilt: mpirun is needed but missing, or lacks fault tolerance that is needed.
    """
    if not options.command:
        raise UsageError("no command; write it after `--`, as in: sordino run -np 4 -- python train.py")
    if options.restarts < 0:
        raise UsageError(f"--restarts {options.restarts}: must be 0 or more")
    if options.respawn < 0:
        raise UsageError(f"--respawn {options.respawn}: must be 0 or more")
    if options.respawn and options.on_peer_lost == "raise":
        raise UsageError("--respawn replaces ranks while the others go on, so it needs --on-peer-lost continue")
    if not 0 <= options.grace <= _LONGEST_GRACE_S:
        raise UsageError(f"--grace {options.grace:g}: must be from 0 to {_LONGEST_GRACE_S:g} seconds")
    limits = run_elastic.check(options)
    hosts = mpi.parse_hosts(options.hosts) if options.hosts is not None else []
    environment = job_environment()
    chosen = {}
    if options.respawn or limits is not None or options.on_peer_lost is not None:
        chosen[ON_PEER_LOST] = options.on_peer_lost or "continue"
    if limits is not None:
        chosen[MIN_RANKS] = str(limits.least)
    if options.record is not None:
        chosen["SORDINO_RECORD"] = os.path.abspath(options.record)
    environment |= chosen
    given = mpi.parse_exports(options.env, False, environment)
    for name in _OF_THE_LAUNCHER:
        if name in given:
            raise UsageError(f"-x {name}: the launcher sets this variable; omit it")
    for name, value in chosen.items():
        if given.get(name, value) != value:
            raise UsageError(f"-x {name}={given[name]} contradicts {name}={value} of another option; omit one")
    if limits is not None:
        start = run_elastic.starter(options, limits, environment, given)
        work = partial(repeat, _noted(start, _record(options, limits.start)), options.restarts)
        return guarded(work, lambda: None, options.grace)
    ranks = _ranks(options.ranks, hosts)
    extra = mpi.parse_extra(options.mpi_args)
    by_mpi = options.launcher == "mpi" or (options.launcher is None and bool(hosts or extra))
    by_mpi = by_mpi or (options.prefers_mpi and _has_mpirun(environment))
    if by_mpi and options.respawn:
        raise UsageError("--respawn needs the local launcher, because no process can join a running job of MPI")
    if not by_mpi and (hosts or extra):
        raise UsageError(f"--launcher local does not take {'--hosts' if hosts else '--mpi-args'}; use --launcher mpi")
    # A batch system gives its hosts to mpirun only.
    known = environment if by_mpi else {}
    capacity.check(ranks, hosts, extra, known, capacity.this_machine(), options.oversubscribe)
    spreads = capacity.spreads(hosts, extra, known)
    exports = mpi.parse_exports(options.env, spreads, environment)
    job = mpi.Job(ranks, options.command, hosts, exports, extra, spreads)
    return (_by_mpi if by_mpi else _locally)(options, job, environment)


def _record(options: argparse.Namespace, ranks: int) -> Lines | None:
    """Open the job's own file of the record, if there is one."""
    if options.record is None:
        return None
    return job_file(options.record, "training", command=options.command, ranks=ranks)


def _noted(start: Start, record: Lines | None) -> Start:
    """Return a function that starts the job, and records its start and its end."""
    if record is None:
        return start

    def noted(number: int, stop: StopSignals) -> Ended:
        record.write("start", number=number, time=time.time())
        ended = start(number, stop)
        record.write("end", number=number, time=time.time(), status=ended.status, why=ended.why)
        return ended

    return noted


def _has_mpirun(environment: dict[str, str]) -> bool:
    try:
        mpi.find_launcher(mpi.build_info(), environment)
    except NotBuilt:
        return False
    return True


def _locally(options: argparse.Namespace, job: mpi.Job, environment: dict[str, str]) -> int:
    environment |= job.exports or {}
    # Otherwise each rank computes with one thread per core, and the ranks slow each other down.
    environment.setdefault("OMP_NUM_THREADS", str(max(1, capacity.this_machine().cores // job.ranks)))
    survives_losses = environment.get(ON_PEER_LOST) == "continue"
    if options.verbose:
        say(f"{job.ranks} ranks: {shlex.join(mpi.resolve(job.command))}")
    with jobs.job_folder() as place:

        def start(number: int, stop: StopSignals) -> Ended:
            variables = {**environment, "SORDINO_RESTART": str(number)}
            return jobs.start_locally(job, variables, place, survives_losses, stop, respawns=options.respawn)

        work = partial(repeat, _noted(start, _record(options, job.ranks)), options.restarts)
        return guarded(work, place.clear, options.grace)


def _by_mpi(options: argparse.Namespace, job: mpi.Job, environment: dict[str, str]) -> int:
    launcher = mpi.find_launcher(mpi.build_info(), environment)
    if options.on_peer_lost == "continue":
        job = replace(job, extra=[*mpi.fault_tolerance(launcher), *job.extra])
    if options.verbose:
        say(shlex.join(mpi.command_line(launcher, job, environment)))
    with jobs.place_for(launcher, job) as place:

        def start(number: int, stop: StopSignals) -> Ended:
            restart = {"SORDINO_RESTART": str(number)}
            numbered = replace(job, exports={**(job.exports or {}), **restart}) if job.spreads else job
            return jobs.start(launcher, numbered, {**environment, **restart}, place, stop)

        work = partial(repeat, _noted(start, _record(options, job.ranks)), options.restarts)
        return guarded(work, place.clear if place else lambda: None, options.grace)


def plain(ranks: int, command: Sequence[str], hosts: str | None = None, prefers_mpi: bool = False) -> int:
    """Run the job as `sordino run` with these options only.

    Args:
        ranks: number of ranks.
        command: the program and its arguments.
        hosts: value of `--hosts`.
        prefers_mpi: whether mpirun starts the ranks if it is installed.
    """
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = parser.parse_args([])
    options.ranks, options.hosts, options.command, options.prefers_mpi = ranks, hosts, command, prefers_mpi
    return main(options)


def _ranks(ranks: int | None, hosts: list[str]) -> int:
    if ranks is None:
        if not hosts:
            raise UsageError("the number of ranks is missing. Give -np N, or --hosts with slots")
        return sum(int(host.partition(":")[2] or 1) for host in hosts)
    if ranks < 1:
        raise UsageError(f"-np {ranks}: at least one rank must run")
    return ranks


def job_environment() -> dict[str, str]:
    """Return the environment of mpirun, or of the ranks on this machine."""
    environment = dict(os.environ)
    # If a rank of another job started this one, the new ranks must not use that job's launcher.
    for name in ("SORDINO_LAUNCHER", NEWCOMER, RENDEZVOUS, RANK, SIZE):
        environment.pop(name, None)
    # The UCX one-sided component prints warnings on machines without InfiniBand; Sordino uses no MPI windows.
    environment.setdefault("OMPI_MCA_osc", "^ucx")
    # Each rank has a pseudo-terminal, even if this process's output is a file. Only this process knows whether its
    # output is a terminal, so it tells the ranks by a variable that rich and others use.
    environment.setdefault("TTY_COMPATIBLE", "1" if sys.stdout.isatty() else "0")
    return environment
