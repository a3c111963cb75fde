"""Starts a program on several ranks: a thin front of mpirun.

  sordino run -np 4 -- python train.py --epochs 2
  sordino run -np 4 --hosts node1:2,node2:2 -x NCCL_DEBUG=INFO -- python train.py

`python` and `sordino` as the command mean the ones that run this command; write a path for another.
The exit status is that of the first rank that failed, 128 + N if signal N ended it; Ctrl-C and SIGTERM reach
the ranks; when the command returns, none of the processes it started on this machine is left.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import BinaryIO

from sordino.cli import mpi
from sordino.cli.processes import supervise
from sordino.cli.scratch import scratch
from sordino.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `sordino run`."""
    parser.usage = "sordino run -np N [options] -- COMMAND [ARGUMENT ...]"
    parser.add_argument("-np", "-n", dest="ranks", type=int, metavar="N", help="number of ranks (default: all slots)")
    parser.add_argument("--hosts", metavar="H1:SLOTS,H2:SLOTS", help="where to run; this machine if not given")
    parser.add_argument(
        "-x", "--env", dest="env", action="append", default=[], metavar="NAME[=VALUE]",
        help="an environment variable for all ranks; SORDINO_* and PYTHONPATH go to all hosts anyway",
    )  # fmt: skip
    parser.add_argument("--mpi-args", default="", metavar="OPTIONS", help="more options for mpirun, as one word")
    parser.add_argument("--verbose", action="store_true", help="show the mpirun command line first")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the program and its arguments")


def main(options: argparse.Namespace) -> int:
    """Runs the job to its end.

    Raises:
        UsageError: the options make no sense together.
        NotBuilt: there is no mpirun.
    """
    if not options.command:
        raise UsageError("no command; write it after `--`, as in: sordino run -np 4 -- python train.py")
    hosts = mpi.parse_hosts(options.hosts) if options.hosts is not None else []
    environment = job_environment()
    job = mpi.Job(
        ranks=_ranks(options.ranks, hosts),
        command=options.command,
        hosts=hosts,
        exports=mpi.parse_exports(options.env, hosts, environment),
        extra=mpi.parse_extra(options.mpi_args),
    )
    launcher = mpi.find_launcher(mpi.build_info(), environment)
    if options.verbose:
        print(f"sordino run: {shlex.join(mpi.command_line(launcher, job))}", file=sys.stderr, flush=True)
    return start(launcher, job)


def start(launcher: mpi.Launcher, job: mpi.Job, timeout: float | None = None, output: BinaryIO | None = None) -> int:
    """Runs a job to its end and clears away what it leaves on this machine; the arguments and status of `supervise`."""
    environment = job_environment()
    words = mpi.command_line(launcher, job)
    if launcher.family != "openmpi" or job.hosts:
        return supervise(words, environment, timeout, output)
    # A killed mpirun leaves its session files and 16 MiB of shared memory for each rank; so they go where they can be
    # removed. Not with several hosts: the folder would be missing on the others.
    shm = Path("/dev/shm")
    base = shm if os.access(shm, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    with scratch(base) as (folder, lock):
        environment.setdefault("OMPI_MCA_btl_sm_backing_directory", str(folder))
        environment.setdefault("PRTE_MCA_prte_local_tmpdir_base", str(folder))
        return supervise(words, environment, timeout, output, inherited=(lock,))


def _ranks(ranks: int | None, hosts: list[str]) -> int:
    if ranks is None:
        if not hosts:
            raise UsageError("how many ranks? Give -np N, or --hosts with slots")
        return sum(int(host.partition(":")[2] or 1) for host in hosts)
    if ranks < 1:
        raise UsageError(f"-np {ranks}: at least one rank must run")
    return ranks


def job_environment() -> dict[str, str]:
    """The environment of mpirun, and so of the ranks on this machine."""
    environment = dict(os.environ)
    # The UCX one-sided component prints warnings on machines without InfiniBand; Sordino uses no MPI windows.
    environment.setdefault("OMPI_MCA_osc", "^ucx")
    # Open MPI gives each rank a pseudo-terminal whatever its own output is. Only this process knows whether a person
    # watches, so it tells the ranks in the way that rich (and others) understand.
    environment.setdefault("TTY_COMPATIBLE", "1" if sys.stdout.isatty() else "0")
    return environment
