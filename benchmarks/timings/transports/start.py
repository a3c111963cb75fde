"""Time from the command to the first step: `sordino run` with and without MPI, torchrun, and no launcher.

  python benchmarks/transports.py start

Launchers take turns, in a different order each round. Times are the last rank's, from the launcher's start to these
points: program entered, torch imported, Sordino imported, initialized, first step done, all processes ended. `alone`
starts as many processes without a launcher; they import torch and take the same step without communication.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from cluster.jobs import failed, machine_before, paths, words_here
from sordino.bench import command_line
from sordino.errors import SordinoError
from sordino.report import Results, records, verdicts
from sordino.report.tables import format_seconds
from sordino.timing import summarize
from timings.transports.report import MOMENTS, REPORTS

_WORKER = Path(__file__).with_name("start_worker.py")
_LIMIT_S = 120.0


def once(name: str, ranks: int) -> Results:
    """Start one job; return the last rank's times, and the time at which all processes ended."""
    with tempfile.TemporaryDirectory() as folder:
        by = "alone" if name == "alone" else "sordino"
        words = ["python", str(_WORKER), by, folder]
        commands = [[sys.executable, *words[1:]]] * ranks if name == "alone" else [command(name, ranks, words)]
        begin = time.time()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **paths(), "WAYS_BEGIN": repr(begin)}
        started = [
            subprocess.Popen(
                each, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            for each in commands
        ]
        for process in started:
            written, _ = process.communicate(timeout=_LIMIT_S)
            if process.returncode:
                raise SordinoError(f"{name} ended with status {process.returncode}: {written[-1000:]!r}")
        end = time.time() - begin
        found = [json.loads(path.read_text()) for path in Path(folder).iterdir()]
    if len(found) != ranks:
        raise SordinoError(f"{name}: {len(found)} of {ranks} ranks took a step")
    return {moment: max(one[moment] for one in found) for moment in found[0]} | {"ended": end}


def command(name: str, ranks: int, words: Sequence[str]) -> list[str]:
    """Return the words that start a job with this launcher."""
    if name == "torchrun":
        return words_here(ranks, words, "torchrun")
    return [sys.executable, "-m", "sordino.cli", "run", "-np", str(ranks), "--launcher", name, "--", *words]


def targets(found: Mapping[str, Results]) -> list[Results]:
    """Return the target: `sordino run` starts ranks in no more time than they need to import torch."""
    local, alone = found["local"], found["alone"]
    starting = local["entered"]["median"] + local["met"]["median"] - local["sordino"]["median"]
    importing = alone["torch"]["median"] - alone["entered"]["median"]
    return [
        verdicts.target("sordino run: launching and meeting, over importing torch", starting / importing, 1.0, False)
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Start the jobs. Status 1 if one failed, 2 if mpirun is not found."""
    options = command_line.parser("transports start", __doc__, 0.0, "(not used)")
    options.add_argument("--ranks", type=int, default=4, metavar="N", help="default 4")
    options.add_argument("--rounds", type=int, default=7, metavar="N", help="starts of each (default 7)")
    chosen = options.parse_args(argv)
    found_machine = machine_before()
    names = ("local", "mpi", "torchrun", "alone")
    samples: dict[str, list[Results]] = {name: [] for name in names}
    try:
        for number in range(1 if chosen.quick else chosen.rounds):
            for name in random.Random(number).sample(names, len(names)):
                samples[name].append(once(name, chosen.ranks))
                records.log(f"{name}: first step after {format_seconds(samples[name][-1]['stepped'])}")
    except SordinoError as error:
        return failed("transports", error)
    found = {
        name: {
            moment: summarize(np.array([one[moment] for one in starts])) for moment in MOMENTS if moment in starts[0]
        }
        for name, starts in samples.items()
    }
    results: Results = {
        "benchmark": "transports_start",
        "name": "transports_start",
        "machine": found_machine,
        "ranks": chosen.ranks,
        "contestants": found,
        "targets": targets(found),
    }
    records.publish(results, command_line.results_folder(chosen), REPORTS)
    return 0
