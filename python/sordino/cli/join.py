"""Adds a rank to a running job.

  sordino run -np 4 --on-peer-lost continue -- python examples/elastic.py       # in one terminal
  sordino join -- python examples/elastic.py                                    # in another one
  sordino join --store node0:29500 -- python train.py                           # on any machine, without `sordino run`

The command is that of the job. Its ranks let the new process in at their next commit() after the process has called
its function that hvd.elastic.run decorates. It has its own output, exit status and end: Ctrl-C here ends this rank
only.

A job of `sordino run` must run on this machine. Its settings of Sordino count, unless they are set here. With several
jobs on this machine, name one by the process id of one of its ranks.

Ranks that have been started in another way, with MASTER_ADDR and MASTER_PORT, meet at a store: --store is its address.
Settings, such as SORDINO_TOKEN, are those of this terminal.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from sordino.errors import UsageError
from sordino.launcher.mpi import resolve
from sordino.rendezvous.environment import (
    ADDRESS,
    NEWCOMER,
    PORT,
    RANK,
    RANK_VARIABLES,
    RENDEZVOUS,
    SIZE,
    TOKEN,
    environment_of,
)
from sordino.rendezvous.sockets import NO_NUMBER, SocketRendezvous

_SHARED = (RENDEZVOUS, TOKEN, SIZE)
_OWN = ("SORDINO_LAUNCHER", RANK, RANK_VARIABLES)  # of one rank; the launcher accepts notices of its children only
_ANSWERS_S = 30.0  # longest wait for the launcher


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `sordino join`."""
    parser.usage = "sordino join [PID | --store HOST:PORT] -- COMMAND [ARGUMENT ...]"
    parser.add_argument("pid", nargs="?", type=int, metavar="PID", help="a rank of the job (default: the only job)")
    parser.add_argument("--store", metavar="HOST:PORT", help="store at which the ranks of the job have met")
    parser.set_defaults(command=[])


def main(options: argparse.Namespace) -> int:
    """Become a process that joins the job.

    Raises:
        UsageError: there is no such job, or more than one.
        TransportError: the job's launcher does not answer.
    """
    if not options.command:
        raise UsageError("no command; write that of the job after `--`, as in: sordino join -- python train.py")
    if options.store is not None:
        if options.pid is not None:
            raise UsageError("name the job by a process id or by --store, not by both")
        return _become(options.command, _at_a_store(options.store))
    return _become(options.command, _on_this_machine(options.pid))


def _at_a_store(address: str) -> dict[str, str]:
    """Return the environment of a process that joins the job at a store."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal():
        raise UsageError(f"--store {address}: write HOST:PORT, those of MASTER_ADDR and MASTER_PORT of the job's ranks")
    environment = dict(os.environ)
    for name in (*_OWN, RENDEZVOUS, SIZE, "RANK", "WORLD_SIZE"):
        environment.pop(name, None)
    return environment | {ADDRESS: host.strip("[]"), PORT: port, NEWCOMER: "1"}


def _on_this_machine(pid: int | None) -> dict[str, str]:
    """Return the environment of a process that joins a job of `sordino run`."""
    job = _job_of(pid)
    path, token = job[RENDEZVOUS], job[TOKEN]
    number = SocketRendezvous(path, token.encode(), NO_NUMBER, _ANSWERS_S).new_number()
    settings = {name: value for name, value in job.items() if name.startswith("SORDINO_") or name == "OMP_NUM_THREADS"}
    environment = {**settings, **os.environ, **{name: job[name] for name in _SHARED}}
    for name in _OWN:
        environment.pop(name, None)
    return environment | {RANK: str(number), NEWCOMER: "1"}


def _become(command: Sequence[str], environment: Mapping[str, str]) -> int:
    words = resolve(command)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # Python ignores them, and the program would inherit that
    try:
        os.execvpe(words[0], words, environment)
    except OSError as error:
        raise UsageError(f"{words[0]}: {error.strerror}") from error


def _job_of(pid: int | None) -> dict[str, str]:
    """Return the environment of a rank of the job that `pid` belongs to; None: of the only job."""
    if pid is not None:
        found = environment_of(pid)
        if not _is_rank(found):
            raise UsageError(
                f"process {pid} is not a rank of `sordino run`, or belongs to another user; `sordino inspect` lists "
                "the ranks"
            )
        return found
    pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    ranks = {one: found for one in pids if _is_rank(found := environment_of(one))}
    jobs = {found[RENDEZVOUS]: (one, found) for one, found in ranks.items() if _answers(found[RENDEZVOUS])}
    if not jobs:
        raise UsageError("no job of `sordino run` by this user runs on this machine")
    if len(jobs) > 1:
        named = ", ".join(str(one) for one, _ in jobs.values())
        raise UsageError(f"{len(jobs)} jobs run here. Name one by a rank of it: sordino join PID -- ... (PID: {named})")
    return next(iter(jobs.values()))[1]


def _is_rank(environment: dict[str, str]) -> bool:
    """Return whether this is the environment of a rank that `sordino run` has started."""
    return all(environment.get(name) for name in _SHARED)


def _answers(path: str) -> bool:
    """Return whether a launcher listens at this path."""
    with socket.socket(socket.AF_UNIX) as one, contextlib.suppress(OSError):
        one.connect(path)
        return True
    return False
