"""Time of communication per step of synchronous SGD, and of local SGD that averages whole models or shards.

This repeats Figures 6 and 10 of hierarchical local SGD. The times are compared with predictions of the cost model.

  python benchmarks/local_sgd.py communication        # as root, in a clone

P groups of K ranks run on one machine, and on emulated hosts with links of --mbps each way, with one rank or one group
per host. Gradients and models are averaged as in training, but without computation, so no communication is hidden. A
model is averaged every 8 steps (ResNet-20) or 4 (EDSR), as in the source, and the time of averaging is divided by that
interval. alpha and beta are measured in the same job.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cluster.jobs import failed, machine_before, run_here, run_on_hosts, wrong_contestants
from sordino.bench import command_line
from sordino.errors import SordinoError
from sordino.report import Results, records, verdicts
from timings.local_sgd.report import REPORTS, per_step

INTERVALS = {"resnet20": 8, "edsr": 4}
_WORKER = "claims.local_sgd.worker"
_SHAPES = ((2, 1), (4, 1), (2, 2), (4, 2))  # P and K


def errors(rows: Sequence[Results]) -> dict[str, Results]:
    """Return the relative errors of predictions on emulated hosts, by contestant: median absolute, largest, count."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row["place"] == "here":
            continue
        for name, entry in row["contestants"].items():
            step = per_step(entry, name, INTERVALS[row["set"]])
            found.setdefault(name, []).append(step["predicted"] / step["total"] - 1)
    return {
        name: {"median": float(np.median(np.abs(values))), "most": max(values, key=abs), "count": len(values)}
        for name, values in found.items()
    }


def targets(rows: Sequence[Results]) -> list[Results]:
    """Return targets for the source's claims and for the accuracy of predictions."""
    entries = []
    for row in rows:
        where = f"{row['set']}, {row['place']}, P={row['groups']}, K={row['members']}"
        steps = {name: per_step(one, name, INTERVALS[row["set"]]) for name, one in row["contestants"].items()}
        value = steps["allreduce"]["total"] / steps["synchronous"]["total"]
        entries.append(verdicts.target(f"{where}: local SGD over synchronous", value, 1.0, at_least=False))
        if "sharded" not in steps:
            continue
        value = steps["sharded"]["averaging"] / steps["allreduce"]["averaging"]
        what = f"{where}: averaging shards over whole models (1/K = {1 / row['members']:g})"
        entries.append(verdicts.target(what, value, 1.2 / row["members"], at_least=False))
        value = steps["sharded"]["total"] / steps["allreduce"]["total"]
        entries.append(verdicts.target(f"{where}: all communication, shards over whole models", value, 1.0, False))
    for name, error in errors(rows).items():
        what = f"{name}: median error of the prediction on emulated hosts"
        entries.append(verdicts.target(what, error["median"], 0.2, at_least=False))
    return entries


def jobs(sets: Sequence[str], quick: bool) -> list[tuple[str, str, int, int]]:
    """Return set, place, P and K of each job."""
    found = []
    for name in sets:
        for groups, members in _SHAPES[2:3] if quick else _SHAPES:
            found += [(name, place, groups, members) for place in ("here", "ranks")]
            found += [(name, "groups", groups, members)] if members > 1 else []
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Start the jobs. Status 1 if a job failed or has a wrong result, 2 if no cluster can be made."""
    options = command_line.parser("local_sgd communication", __doc__, 20.0, "job to measure its links")
    options.add_argument("--mbps", type=float, default=500.0, metavar="RATE", help="of each link (default 500)")
    options.add_argument("--sets", default="resnet20,edsr", metavar="LIST", help="of parameters (default both)")
    chosen = options.parse_args(argv)
    sets = ["resnet20"] if chosen.quick else chosen.sets.split(",")
    if not set(sets) <= INTERVALS.keys():
        options.error(f"--sets {chosen.sets}: known are {', '.join(INTERVALS)}")
    found_machine = machine_before()
    rows: list[Results] = []
    try:
        for name, place, groups, members in jobs(sets, chosen.quick):
            turns, rounds = (1, 2) if chosen.quick else (5, 6) if name == "resnet20" else (2, 2)
            budget = 1.0 if chosen.quick else chosen.budget
            words = ["--set", name, "--members", str(members), "--turns", str(turns), "--rounds", str(rounds)]
            words += ["--budget", f"{budget:g}"]
            if place == "here":
                row = run_here(groups * members, _WORKER, words)
            else:
                each = members if place == "groups" else 1
                row = run_on_hosts(groups * members // each, each, chosen.mbps, _WORKER, words)
            rows.append(row | {"place": place})
            steps = {key: per_step(one, key, INTERVALS[name]) for key, one in row["contestants"].items()}
            parts = [
                f"{key} {1e3 * one['total']:.3g} ms ({one['predicted'] / one['total'] - 1:+.0%})"
                for key, one in steps.items()
            ]
            records.log(f"{name}, {place}, P={groups}, K={members}: {', '.join(parts)}")
    except SordinoError as error:
        return failed("local_sgd", error)
    wrong = wrong_contestants(rows)
    results: Results = {
        "benchmark": "local_sgd_communication",
        "name": "local_sgd_communication",
        "machine": found_machine,
        "mbps": chosen.mbps,
        "intervals": INTERVALS,
        "rows": rows,
        "errors": errors(rows),
        "wrong": wrong,
        "targets": targets(rows),
    }
    records.publish(results, command_line.results_folder(chosen), REPORTS)
    return 1 if wrong else 0
