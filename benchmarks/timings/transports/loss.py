"""Time from `kill -9` of a rank to the error in the other ranks, which average repeatedly.

  python benchmarks/transports.py loss                # as root, in a clone: half of the jobs are on emulated hosts

Three ranks run on one machine, started by `sordino run` and by mpirun, and on three hosts, over UCX and over MPI. So
that no launcher ends the other ranks, mpirun has the option --with-ft ulfm, and the ranks over UCX have no launcher.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from cluster import Cluster
from cluster.jobs import failed, machine_before, paths, words_here
from sordino.bench import command_line
from sordino.errors import SordinoError
from sordino.report import Results, records
from sordino.report.tables import format_seconds
from sordino.timing import summarize
from timings.transports.report import REPORTS

_RANKS = 3
_MBPS = 1000
_LIMIT_S = 60.0
_WORKER = str(Path(__file__).with_name("loss_worker.py"))
_OUTLIVE = ("--with-ft", "ulfm")


def _local(words: Sequence[str]) -> None:
    _here(words_here(_RANKS, words, "local"))


def _mpi(words: Sequence[str]) -> None:
    mpirun, *rest = words_here(_RANKS, words, "mpirun")
    _here([mpirun, *_OUTLIVE, *rest])


def _here(words: Sequence[str]) -> None:
    environment = {**os.environ, **paths()}
    subprocess.run(words, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=_LIMIT_S)


def _hosts_mpi(words: Sequence[str]) -> None:
    with Cluster(_RANKS, _MBPS) as cluster:
        cluster.run(_RANKS, words, paths(), timeout=_LIMIT_S, options=_OUTLIVE)


def _hosts_ucx(words: Sequence[str]) -> None:
    with Cluster(_RANKS, _MBPS) as cluster:
        cluster.processes(_RANKS, words, paths(), timeout=_LIMIT_S)


WAYS: Mapping[str, tuple[str, Callable[[Sequence[str]], None]]] = {
    "local": ("local", _local),
    "mpi": ("mpi", _mpi),
    "hosts_ucx": ("ucx", _hosts_ucx),
    "hosts_mpi": ("mpi", _hosts_mpi),
}
"""Transport and start function of each kind of job."""


def once(name: str) -> list[float]:
    """Return the seconds until the error in each surviving rank.

    Raises:
        SordinoError: a surviving rank got no error, or the job used another transport.
    """
    transport, start = WAYS[name]
    with tempfile.TemporaryDirectory() as folder:
        start(["python", _WORKER, folder])
        killed = json.loads(Path(folder, "killed").read_text())
        told = [json.loads(path.read_text()) for path in Path(folder).glob("told.*")]
    if killed["transport"].split()[0] != transport:
        raise SordinoError(f"{name} went by {killed['transport']}")
    if len(told) != _RANKS - 1:
        raise SordinoError(f"{name}: {len(told)} of {_RANKS - 1} survivors were told")
    return [one["at"] - killed["at"] for one in told]


def main(argv: Sequence[str] | None = None) -> int:
    """Start the jobs. Status 1 if one failed, 2 if no cluster can be made."""
    options = command_line.parser("transports loss", __doc__, 0.0, "(not used)")
    options.add_argument("--rounds", type=int, default=10, metavar="N", help="losses of each (default 10)")
    chosen = options.parse_args(argv)
    found_machine = machine_before()
    samples: dict[str, list[float]] = {name: [] for name in WAYS}
    try:
        for number in range(1 if chosen.quick else chosen.rounds):
            for name in random.Random(number).sample(sorted(WAYS), len(WAYS)):
                samples[name] += once(name)
                records.log(f"{name}: {', '.join(format_seconds(one) for one in samples[name][1 - _RANKS :])}")
    except SordinoError as error:
        return failed("transports", error)
    results: Results = {
        "benchmark": "transports_loss",
        "name": "transports_loss",
        "machine": found_machine,
        "ranks": _RANKS,
        "mbps": _MBPS,
        "contestants": {name: summarize(np.array(found)) | {"most": max(found)} for name, found in samples.items()},
    }
    records.publish(results, command_line.results_folder(chosen), REPORTS)
    return 0
