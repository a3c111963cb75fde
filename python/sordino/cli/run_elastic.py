"""Options of `sordino run` for jobs on hosts that change, and the start of such jobs."""

from __future__ import annotations

import argparse
import resource
import shlex
from collections.abc import Callable, Mapping

from sordino.errors import UsageError
from sordino.launcher import mpi
from sordino.launcher.descriptors import say
from sordino.launcher.discovery import Discovery
from sordino.launcher.elastic import FILES_PER_PROCESS, OTHER_FILES, SSH, ElasticJob, Limits
from sordino.launcher.processes import Ended, StopSignals

_PATIENCE_S = 600.0
_MOST = 1024  # ranks, each of which may need a connection by ssh


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--host-discovery-script", metavar="COMMAND",
        help="command, run every second, that prints the hosts of a job of hvd.elastic.run, as NAME:SLOTS",
    )  # fmt: skip
    parser.add_argument("--min-np", type=int, metavar="N", help="ranks below which training waits (default 1)")
    parser.add_argument(
        "--max-np", type=int, metavar="N",
        help=f"most ranks (default: all slots, up to {_MOST}, or what open files allow)",
    )  # fmt: skip
    parser.add_argument(
        "--elastic-timeout", type=float, metavar="S",
        help=f"seconds to wait for -np slots, and later for --min-np ranks (default {_PATIENCE_S:g})",
    )  # fmt: skip
    parser.add_argument(
        "--ssh",
        metavar="COMMAND",
        help="command that takes a host and a command (default: ssh with options)",
    )


def check(options: argparse.Namespace) -> Limits | None:
    """Return the limits of the job; None without `--host-discovery-script`.

    Raises:
        UsageError: options contradict each other.
    """
    if options.host_discovery_script is None:
        for name in ("min_np", "max_np", "elastic_timeout", "ssh"):
            if getattr(options, name) is not None:
                raise UsageError(f"--{name.replace('_', '-')} needs --host-discovery-script")
        return None
    for name, given in (
        ("--hosts", options.hosts is not None),
        ("--mpi-args", options.mpi_args),
        ("--launcher mpi", options.launcher == "mpi"),
        ("--oversubscribe", options.oversubscribe),
        ("--respawn", options.respawn),
        ("--on-peer-lost raise", options.on_peer_lost == "raise"),
    ):
        if given:
            raise UsageError(f"{name} contradicts --host-discovery-script; omit one")
    least = 1 if options.min_np is None else options.min_np
    start = least if options.ranks is None else options.ranks
    most = max(start, _most()) if options.max_np is None else options.max_np
    if not 1 <= least <= start <= most:
        raise UsageError(
            f"--min-np {least}, -np {start}, --max-np {most}: must be at least 1, and none larger than the next"
        )
    patience = _PATIENCE_S if options.elastic_timeout is None else options.elastic_timeout
    if not patience >= 0:
        raise UsageError(f"--elastic-timeout {patience:g}: must be 0 or more")
    return Limits(start, least, most, patience)


def _most() -> int:
    """Return the largest number of processes for which this process may open files, at most `_MOST`."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if hard == resource.RLIM_INFINITY else min(_MOST, (hard - OTHER_FILES) // FILES_PER_PROCESS)


def starter(
    options: argparse.Namespace, limits: Limits, environment: Mapping[str, str], given: Mapping[str, str]
) -> Callable[[int, StopSignals], Ended]:
    """Return a function that starts the job for the n-th time. `given`: the variables of -x."""
    exported = mpi.parse_exports(options.env, True, environment)
    words, ssh = mpi.resolve(options.command), options.ssh or SSH
    if options.verbose:
        say(f"{shlex.join(words)}; on other hosts by {ssh}")

    def start(number: int, stop: StopSignals) -> Ended:
        restart = {"SORDINO_RESTART": str(number)}
        discovery = Discovery(options.host_discovery_script)
        try:
            job = ElasticJob(
                words, {**environment, **given, **restart}, {**exported, **restart},
                discovery, limits, options.grace, ssh,
            )  # fmt: skip
            return job.run(stop)
        finally:
            discovery.close()

    return start
