"""Layered SGD: time that a step waits for communication while batches are loaded.

  python benchmarks/layered.py                        # as root, in a clone: it makes hosts and starts the ranks

In each job Layered (with communicators as threads or as separate ranks) takes turns with AllReduce. A step averages
existing gradients, then loading sleeps for 0, 1/2, 1 and 2 times the time of AllReduce without loading, then a
parameter is accessed. The time of the step, less the sleep, is exposed communication. Horovod has its own job. Jobs run
on this machine, and on emulated hosts with links of --mbps each way, where a group is a host.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

from cluster.jobs import failed, machine_before, run_here, run_on_hosts, wrong_contestants
from sordino.bench import command_line
from sordino.errors import SordinoError
from sordino.report import Results, records, verdicts
from sordino.report.tables import format_seconds
from timings.layered.report import REPORTS, hidden, where

_WORKER = "timings.layered.worker"


class Job(NamedTuple):
    """Settings of a job; 0 hosts: on this machine."""

    set: str
    hosts: int
    workers: int
    mode: str

    @property
    def members(self) -> int:
        """K, the members of a group; a group is a host."""
        return self.workers // max(self.hosts, 1)


def jobs(quick: bool) -> list[Job]:
    """Return all jobs."""
    places = [("resnet20", 0, 2)] if quick else [("resnet20", 0, 4), ("resnet50", 0, 4)]
    places += [("resnet20", 2, 2)] if quick else [("resnet20", 2, 4), ("resnet50", 2, 4), ("resnet50", 4, 4)]
    found = []
    for name, hosts, workers in places:
        modes = ["thread"] + ["rank"] * (hosts > 0 or not quick) + ["horovod"] * (hosts == 0)
        found += [Job(name, hosts, workers, mode) for mode in modes]
    return found


def run(job: Job, mbps: float, rounds: int) -> Results:
    """Run a job and return its results.

    Raises:
        NotBuilt: this machine cannot run the job. SordinoError: it failed.
    """
    words = ["--set", job.set, "--members", str(job.members), "--communicator", job.mode, "--rounds", str(rounds)]
    ranks = job.members + (job.mode == "rank")
    hosts = job.hosts
    found = run_on_hosts(hosts, ranks, mbps, _WORKER, words) if hosts else run_here(ranks, _WORKER, words)
    return found | {"set": job.set, "place": "hosts" if job.hosts else "here", "workers": job.workers, "mode": job.mode}


def targets(rows: Sequence[Results]) -> list[Results]:
    """Return the targets: communication is hidden by loading, and as fast as AllReduce's if nothing is loaded."""
    entries = []
    for row in rows:
        if "Layered" not in row["contestants"]:
            continue
        for load in ("1", "2"):
            what = f"{where(row)}: hidden while loading takes {load} all-reduce"
            entries.append(verdicts.target(what, hidden(row, "Layered", load), 0.95, at_least=True))
        exposed = {name: one["exposed"]["0"]["median"] for name, one in row["contestants"].items()}
        value = exposed["Layered"] / exposed["AllReduce"]
        entries.append(verdicts.target(f"{where(row)}: nothing to load, over AllReduce", value, 1.1, at_least=False))
    return entries


def main(argv: Sequence[str] | None = None) -> int:
    """Start the jobs. Status 1 if a job failed or has a wrong result, 2 if no cluster can be made."""
    options = command_line.parser("layered", __doc__)
    options.add_argument("--mbps", type=float, default=500.0, metavar="RATE", help="of each link (default 500)")
    chosen = options.parse_args(argv)
    found_machine = machine_before()
    rows: list[Results] = []
    notes: dict[str, str] = {}
    try:
        for job in jobs(chosen.quick):
            rounds = 2 if chosen.quick else 15 if job.set == "resnet20" or job.hosts == 0 else 3
            row = run(job, chosen.mbps, rounds)
            if "missing" in row:
                notes["Horovod"] = row["missing"]
                continue
            notes |= {"Horovod": row["version"]} if "version" in row else {}
            rows.append(row)
            for name, one in row["contestants"].items():
                told = ", ".join(format_seconds(entry["median"]) for entry in one["exposed"].values())
                records.log(f"{where(row)}: {name} exposes {told}")
    except SordinoError as error:
        return failed("layered", error)
    wrong = wrong_contestants(rows)
    results: Results = {
        "benchmark": "layered",
        "name": "layered",
        "machine": found_machine,
        "mbps": chosen.mbps,
        "baselines": notes,
        "rows": rows,
        "wrong": wrong,
        "targets": targets(rows),
    }
    records.publish(results, command_line.results_folder(chosen), REPORTS)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
