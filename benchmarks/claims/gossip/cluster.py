"""How training scales with the number of workers over slow links: Figure 9 of Crossover-SGD, on emulated hosts.

  python benchmarks/gossip.py cluster        # as root, in a clone

Hosts are namespaces of this machine, joined by links of --mbps each way (benchmarks/cluster). What goes over the links
is real: parameters and gradients of ResNet-50 with half as many channels (6.4 M), backward hooks, steps. Computation is
not: the hosts share this machine's few cores, so each worker sleeps --compute-ms a step instead, a third of it in
forward. The source does not say how long its nodes computed. The first of the default lengths is what AllReduce among
eight workers sends for, so one may hide the other; the second is a quarter of it, so the links decide. An image stands
for a part of a step, --batch of them.

Contestants take turns in one job for each number of workers:
  allreduce         AllReduce, segments reduced as backward completes them
  allreduce_after   the same as one segment, so all of it after backward
  pushsum           SGP
  pushsum_overlap   SGP whose exchange runs beside the next step
  crossover         Crossover by blocks
  hierarchical      Crossover in groups of two neighbouring ranks: two hosts, or one host where a host has two ranks
Efficiency is the throughput over that of one worker times the number of workers.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

from claims.gossip.report import REPORTS
from cluster.jobs import failed, machine_before, run_on_hosts, wrong_contestants
from sordino.bench import command_line
from sordino.errors import SordinoError
from sordino.report import Results, records, verdicts
from sordino.timing import summarize

_FULL = {"workers": "2,4,8", "ranks_per_host": "1,2", "mbps": 200.0, "compute_ms": "1800,450", "steps": 2}
_QUICK = {"workers": "2,4", "ranks_per_host": "1,2", "mbps": 2000.0, "compute_ms": "60", "steps": 1}
_WORKER = "claims.gossip.worker"
_CLAIMS = (  # of the source, section 4.3
    ("crossover", "allreduce", 1.40, "Crossover over AllReduce (source: about 1.4)"),
    ("pushsum", "allreduce", 1.40, "PushSum over AllReduce (source: about 1.4)"),
    ("crossover", "pushsum", 0.96, "Crossover over PushSum (source: 0.96 to 0.97)"),
    ("hierarchical", "allreduce", 1.0, "hierarchical Crossover over AllReduce (source: expected above 1)"),
)


def rows_of(job: Results, steps: int, batch: int, alone: dict[float, float]) -> list[Results]:
    """Throughput in images a second and efficiency of every contestant, a row a length of computation.

    Args:
        alone: images a second of one worker by milliseconds of computation; the first job is to fill it.
    """
    rows = []
    for row in job["rows"]:
        entries = {}
        for name, seconds in row["seconds"].items():
            speeds = summarize(job["ranks"] * batch * steps / np.array(seconds))
            ideal = job["ranks"] * alone.setdefault(row["compute_ms"], speeds["median"])
            parts = {part: speeds[part] / ideal for part in ("median", "q1", "q3")}
            entries[name] = {"throughput": speeds, "efficiency": parts, "right": job["right"][name]}
            entries[name] |= job["traffic"][name]
        places = {key: job[key] for key in ("hosts", "ranks_per_host", "ranks", "parameters", "job_bytes")}
        rows.append(places | {key: row[key] for key in ("compute_ms", "busy_cores")} | {"contestants": entries})
    return rows


def targets(rows: Sequence[Results]) -> list[Results]:
    """The source's claims, at most workers, for each way to place them and length of computation."""
    entries = []
    most = max(row["ranks"] for row in rows)
    for row in rows:
        if row["ranks"] < most:
            continue
        where = f"{row['ranks']} workers, {row['ranks_per_host']} a host, {row['compute_ms']:g} ms"
        for over, under, claim, what in _CLAIMS:
            found = [row["contestants"][name] for name in (over, under) if name in row["contestants"]]
            both = [one["efficiency"]["median"] for one in found]
            value = both[0] / both[1] if len(both) == 2 else None
            entries.append(verdicts.target(f"{where}: {what}", value, claim, at_least=True))
    return entries


def measure(chosen: argparse.Namespace) -> list[Results]:
    """Every job, that of one worker first."""
    budget = 0.0 if chosen.quick else chosen.budget
    lengths = chosen.compute_ms.split(",")
    arguments = ["--compute-ms", *lengths, "--budget", f"{budget:g}", "--steps", str(chosen.steps)]
    jobs = [(1, 1)]
    for each in (int(text) for text in chosen.ranks_per_host.split(",")):
        jobs += [(int(text) // each, each) for text in chosen.workers.split(",") if int(text) % each == 0]
    rows: list[Results] = []
    alone: dict[float, float] = {}
    for hosts, each in jobs:
        found = rows_of(run_on_hosts(hosts, each, chosen.mbps, _WORKER, arguments), chosen.steps, chosen.batch, alone)
        for row in found:
            parts = [f"{name} {one['efficiency']['median']:.2f}" for name, one in row["contestants"].items()]
            where = f"{row['ranks']} workers on {hosts} hosts, {row['compute_ms']:g} ms"
            records.log(f"{where}: {', '.join(parts)}; {row['busy_cores']} cores busy")
        rows += found
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Makes the clusters and runs the jobs. Status 1 if a job failed or computed something wrong, 2 if there can be no
    cluster."""
    options = command_line.parser("gossip cluster", __doc__, 60.0, "job and length of computation")
    options.add_argument("--workers", metavar="LIST", help="how many, besides one (default 2,4,8)")
    options.add_argument("--ranks-per-host", metavar="LIST", help="all of it for each (default 1,2)")
    options.add_argument("--mbps", type=float, metavar="RATE", help="of each link (default 200)")
    options.add_argument("--compute-ms", metavar="LIST", help="in a step (default 1800,450)")
    options.add_argument("--batch", type=int, default=32, metavar="N", help="images a step and worker (default 32)")
    options.add_argument("--steps", type=int, metavar="N", help="measured as one (default 2)")
    chosen = options.parse_args(argv)
    for name, value in (_QUICK if chosen.quick else _FULL).items():
        if getattr(chosen, name) is None:
            setattr(chosen, name, value)
    found_machine = machine_before()
    try:
        rows = measure(chosen)
    except SordinoError as error:
        return failed("gossip", error)
    wrong = wrong_contestants(rows)
    results: Results = {
        "benchmark": "gossip_cluster",
        "name": "gossip_cluster",
        "machine": found_machine,
        "mbps": chosen.mbps,
        "batch": chosen.batch,
        "steps": chosen.steps,
        "rows": rows,
        "wrong": wrong,
        "targets": targets(rows),
    }
    records.publish(results, command_line.results_folder(chosen), REPORTS)
    return 1 if wrong else 0
