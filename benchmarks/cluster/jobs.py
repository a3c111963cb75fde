"""Start of a benchmark's ranks, here or on emulated hosts. Rank 0 prints the results as a line of JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch

import sordino.torch as hvd
from cluster import Cluster
from sordino._core import build_info
from sordino.algorithms import Algorithm
from sordino.errors import NotBuilt, SordinoError, UsageError
from sordino.launcher import mpi
from sordino.report import Results, machines, records
from sordino.timing import Participants, Watch

Starter = Literal["mpirun", "torchrun", "local"]
"""Launcher of a job; "local" is `sordino run` on one machine."""

_TIMEOUT_S = 3600
_BENCHMARKS = Path(__file__).resolve().parents[1]


def work(measure: Callable[[Participants], Results], algorithm: Algorithm | None = None) -> int:
    """Run `measure` as a rank of a job, print its result on rank 0, and return the exit status.

    `algorithm` is passed to `hvd.init`.
    """
    torch.set_num_threads(1)
    hvd.init(algorithm=algorithm)
    # Without mpi4py: its barrier would spin on cores that other hosts need.
    found = measure(Participants(hvd.rank(), hvd.size(), None, one_node=hvd.cross_size() == 1))
    if hvd.rank() == 0:
        print(json.dumps(found), flush=True)
    hvd.shutdown()
    return 0


def machine_before() -> Results:
    """Return the machine, and the cores that other processes use before any host is made.

    Later, the kernel's work for the hosts' links could not be told apart from other processes.
    """
    mpi, watch = build_info()["mpi"], Watch(Participants())
    found = machines.machine(mpi["library"] if mpi else None)
    time.sleep(1.0)
    return found | {"others": watch.others()}


def paths() -> dict[str, str]:
    """Return the environment variable PYTHONPATH with the folder of benchmarks in front."""
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": f"{_BENCHMARKS}{os.pathsep}{before}" if before else str(_BENCHMARKS)}


def words_here(ranks: int, words: Sequence[str], starter: Starter) -> list[str]:
    """Return the command that runs `words` on every rank of a job on this machine.

    Raises:
        NotBuilt: mpirun is not found.
    """
    if starter == "mpirun":
        launcher = mpi.find_launcher(build_info(), os.environ)
        return mpi.command_line(launcher, mpi.Job(ranks, list(words), exports=paths()))
    if starter == "torchrun":
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        return [*torchrun, "--no-python", *mpi.resolve(words)]
    return [sys.executable, "-m", "sordino.cli", "run", "-np", str(ranks), "--", *words]


def run_here(ranks: int, module: str, arguments: Sequence[str], starter: Starter = "mpirun") -> Results:
    """Return the results of one job with all ranks on this machine.

    Raises:
        NotBuilt: mpirun is not found. SordinoError: the job failed, or took an hour.
    """
    words = words_here(ranks, ["python", "-m", module, *arguments], starter)
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **paths()}  # torchrun warns if it is not set
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT_S, env=environment
        )
    except subprocess.TimeoutExpired as error:
        raise SordinoError(f"{ranks} ranks were not done after {_TIMEOUT_S} s") from error
    return _found(done, f"{ranks} ranks") | {"hosts": 1, "ranks_per_host": ranks, "ranks": ranks}


def run_on_hosts(
    hosts: int,
    ranks_per_host: int,
    mbps: float | Sequence[float] | None,
    module: str,
    arguments: Sequence[str],
    starter: Starter = "mpirun",
) -> Results:
    """Return the results of one job on its own cluster, and the bytes of the host that sent most.

    `mbps` is the rate of all links, or of each. With torchrun, ranks use UCX between hosts.

    Raises:
        NotBuilt: no cluster can be made here. SordinoError: the job failed, or took an hour.
    """
    ranks, words = hosts * ranks_per_host, ["python", "-m", module, *arguments]
    with Cluster(hosts, mbps) as cluster:
        run = cluster.torchrun if starter == "torchrun" else cluster.run
        try:
            done = run(ranks, words, paths(), timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise SordinoError(f"{ranks} ranks on {hosts} hosts were not done after {_TIMEOUT_S} s") from error
        sent = [link.sent for link in cluster.traffic().values()]
    found = _found(done, f"{ranks} ranks on {hosts} hosts")
    return found | {"hosts": hosts, "ranks_per_host": ranks_per_host, "ranks": ranks, "job_bytes": max(sent)}


def failed(program: str, error: SordinoError) -> int:
    """Log why there are no results; return the exit status: 2 if this machine cannot run the job, 1 if it failed."""
    records.log(f"{program}: {error}")
    return 2 if isinstance(error, (NotBuilt, UsageError)) else 1


def wrong_contestants(rows: Sequence[Results]) -> list[str]:
    """Return the names of contestants with wrong results."""
    return sorted({name for row in rows for name, one in row["contestants"].items() if not one["right"]})


def _found(done: subprocess.CompletedProcess[str], who: str) -> Results:
    if done.returncode != 0:
        said = machines.without_paths(done.stderr[-2000:])
        raise SordinoError(f"{who} ended with status {done.returncode}:\n{said}")
    # The output is that of all hosts, and may contain warnings of UCX.
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise SordinoError(f"{who} found nothing; they wrote:\n{machines.without_paths(done.stdout[-2000:])}")
    found: Results = json.loads(lines[-1])
    return found
