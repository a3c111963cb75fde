"""Layered SGD: what a step waits for communication while batches are loaded, and how it scales.

  python benchmarks/layered.py                        # as root, in a clone: it makes hosts and starts the ranks

In each job Layered (communicators as threads, or as ranks of their own) takes turns with AllReduce: gradients that lie
there are averaged, then loading sleeps for 0, 1/2, 1 and 2 times what AllReduce takes without, then a parameter is
touched. What is not loading is exposed communication. Horovod has a job of its own. Jobs run on this machine, and on
emulated hosts with links of --mbps each way, where a group is a host. Scaling from 4 to 256 workers is predicted with
the links measured there.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import NamedTuple

from claims.layered.report import REPORTS, SHARES, WORKERS_ON_A_NODE, hidden, where
from cluster.jobs import failed, machine_before, run_here, run_on_hosts, wrong_contestants
from sordino.algorithms import Algorithm, AllReduce, Layered
from sordino.bench import command_line
from sordino.bench.resnet import resnet50_shapes
from sordino.errors import SordinoError
from sordino.plan import cost_of
from sordino.plan.costs import Rates
from sordino.report import Results, records, verdicts
from sordino.report.tables import format_seconds

_WORKER = "claims.layered.worker"
SOURCE = {"AllReduce": 0.638, "Layered": 0.931}  # Figure 6, at 256 workers
COUNTS = (4, 8, 16, 32, 64, 128, 256)


class Job(NamedTuple):
    """Workers on hosts (0: this machine)."""

    set: str
    hosts: int
    workers: int
    mode: str

    @property
    def members(self) -> int:
        """K: a group is a host."""
        return self.workers // max(self.hosts, 1)


def jobs(quick: bool) -> list[Job]:
    """What is run."""
    places = [("resnet20", 0, 2)] if quick else [("resnet20", 0, 4), ("resnet50", 0, 4)]
    places += [("resnet20", 2, 2)] if quick else [("resnet20", 2, 4), ("resnet50", 2, 4), ("resnet50", 4, 4)]
    found = []
    for name, hosts, workers in places:
        modes = ["thread"] + ["rank"] * (hosts > 0 or not quick) + ["horovod"] * (hosts == 0)
        found += [Job(name, hosts, workers, mode) for mode in modes]
    return found


def run(job: Job, mbps: float, rounds: int, links: float) -> Results:
    """What the job found.

    Raises:
        NotBuilt: there can be no such job here. SordinoError: it failed.
    """
    words = ["--set", job.set, "--members", str(job.members), "--communicator", job.mode, "--rounds", str(rounds)]
    ranks = job.members + (job.mode == "rank")
    if job.hosts == 0:
        found = run_here(ranks, _WORKER, words)
    else:
        found = run_on_hosts(job.hosts, ranks, mbps, _WORKER, [*words, "--links", f"{links:g}"])
    return found | {"set": job.set, "place": "hosts" if job.hosts else "here", "workers": job.workers, "mode": job.mode}


def targets(rows: Sequence[Results]) -> list[Results]:
    """What the issue of it is: hidden where there is loading, and no dearer where there is none."""
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


def scaling(rates: Rates) -> list[Results]:
    """Predicted efficiency with ResNet-50, 4 workers a node. A step without communication takes what makes AllReduce as
    efficient as the source's at 256 workers; so there is nothing else to choose.

    Returns:
        for each number of workers, by algorithm; Layered for each share of the step that is loading.
    """
    shapes = resnet50_shapes()
    names, sizes = [name for name, _ in shapes], [4 * math.prod(shape) for _, shape in shapes]

    def exposed(algorithm: Algorithm, workers: int, loading: float) -> float:
        nodes = [rank // WORKERS_ON_A_NODE for rank in range(workers)]
        return cost_of(algorithm, nodes, names, sizes).exposed(rates, 0.0, loading)

    alone = exposed(AllReduce(), COUNTS[-1], 0.0) * SOURCE["AllReduce"] / (1 - SOURCE["AllReduce"])
    found = []
    for workers in COUNTS:
        row: Results = {"workers": workers, "AllReduce": alone / (alone + exposed(AllReduce(), workers, 0.0))}
        for share in SHARES:
            waits = exposed(Layered(WORKERS_ON_A_NODE), workers, share * alone)
            row[f"Layered {share:g}"] = alone / (alone + waits)
        found.append(row)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Starts the jobs. Status 1 if a job failed or computed something wrong, 2 if there can be no cluster."""
    options = command_line.parser("layered", __doc__, 20.0, "job to measure its links")
    options.add_argument("--mbps", type=float, default=500.0, metavar="RATE", help="of each link (default 500)")
    chosen = options.parse_args(argv)
    found_machine = machine_before()
    rows: list[Results] = []
    notes: dict[str, str] = {}
    rates: Rates | None = None
    try:
        for job in jobs(chosen.quick):
            rounds = 2 if chosen.quick else 15 if job.set == "resnet20" or job.hosts == 0 else 3
            row = run(job, chosen.mbps, rounds, 1.0 if chosen.quick else chosen.budget)
            if "missing" in row:
                notes["Horovod"] = row["missing"]
                continue
            notes |= {"Horovod": row["version"]} if "version" in row else {}
            if "rates" in row and job.mode == "thread" and (rates is None or job.members > 1):
                rates = Rates.from_results(row["rates"])
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
        "scaling": scaling(rates) if rates is not None else [],
        "source": SOURCE,
        "wrong": wrong,
        "targets": targets(rows),
    }
    records.publish(results, command_line.results_folder(chosen), REPORTS)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
