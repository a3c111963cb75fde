"""Cost of serving pulls for a rank that computes, and cost of a snapshot.

  python benchmarks/scheduled_pull.py serving              # as root, in a clone: two of the jobs are on emulated hosts

One rank computes products of matrices, about 10 ms per step. The other rank pulls its snapshots continuously, far more
often than gossip would. These ways take turns: alone (the other rank sleeps), neighbour (the other rank copies as many
of its own bytes, which also disturbs if both share memory), pulled, publishing (a snapshot after each step), and
publishing while pulled. They run on this machine, where the other rank copies the snapshot itself, and on emulated
hosts, where a thread of the computing rank sends it. A snapshot is also timed against copies of as many bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cluster.jobs import failed, machine_before, run_here, run_on_hosts
from sordino.bench import command_line
from sordino.errors import SordinoError
from sordino.report import Results, records, verdicts
from sordino.report.tables import format_bytes, format_seconds
from sordino.timing import summarize
from timings.scheduled_pull.report import REPORTS, where

_WORKER = "timings.scheduled_pull.serving_worker"
PLACES: tuple[float | None, ...] = (None, 1000.0, 10000.0)  # Mbps between two hosts; None: on this machine
_FULL: Results = {"sizes": (3670016, 25 << 20), "step-ms": 10.0, "steps": 20, "rounds": 10, "budget": 5.0}
_QUICK: Results = {"sizes": (1 << 20,), "step-ms": 3.0, "steps": 3, "rounds": 1, "budget": 0.1}
LIMIT = 1.15
COMPARED = (("pulled", "alone"), ("pulled", "neighbour"), ("publishing_pulled", "publishing"), ("publishing", "alone"))


def words_of(settings: Results) -> list[str]:
    """Return settings as options of a worker."""
    words = []
    for name, value in settings.items():
        values = value if isinstance(value, tuple) else (value,)
        words += [f"--{name}", *(str(one) for one in values)]
    return words


def rows_of(job: Results, mbps: float | None) -> list[Results]:
    """Return one row per size, with the ratios of the median step times of each round."""
    rows = []
    for size in job["sizes"]:
        ways = size["ways"]
        ratios = {
            f"{over} / {under}": summarize(np.array(ways[over]["rounds"]) / np.array(ways[under]["rounds"]))
            for over, under in COMPARED
        }
        copies = [size["publication"][name]["median"] for name in ("torch", "numpy")]
        row = size | {"mbps": mbps, "cores_per_rank": job["cores_per_rank"], "ratios": ratios}
        rows.append(row | {"over_copy": size["publication"]["publish"]["median"] / min(copies)})
    return rows


def targets(rows: Sequence[Results]) -> list[Results]:
    """Return the targets: a snapshot is as fast as a copy, and pulls do not slow the computing rank down."""
    entries = []
    for row in rows:
        what = f"{format_bytes(row['bytes'])}, {where(row)}"
        if row["mbps"] is None:
            entries.append(verdicts.target(f"{what}: a snapshot, over a copy", row["over_copy"], LIMIT, at_least=False))
        value = row["ratios"]["publishing_pulled / publishing"]["median"]
        entries.append(
            verdicts.target(f"{what}: a step that is pulled from, over one that is not", value, LIMIT, False)
        )
    return entries


def main(argv: Sequence[str] | None = None) -> int:
    """Start the jobs. Status 1 if a job failed, 2 if no cluster can be made."""
    options = command_line.parser("scheduled_pull serving", __doc__, _FULL["budget"], "size and place, of snapshots")
    chosen = options.parse_args(argv)
    settings = _QUICK if chosen.quick else _FULL | {"budget": chosen.budget}
    found_machine = machine_before()
    rows: list[Results] = []
    try:
        for mbps in PLACES[:1] if chosen.quick else PLACES:
            words = words_of(settings)
            found = run_here(2, _WORKER, words) if mbps is None else run_on_hosts(2, 1, mbps, _WORKER, words)
            for row in rows_of(found, mbps):
                rows.append(row)
                times = [f"{name} {format_seconds(one['step']['median'])}" for name, one in row["ways"].items()]
                records.log(f"{format_bytes(row['bytes'])}, {where(row)}: {', '.join(times)}")
    except SordinoError as error:
        return failed("scheduled_pull", error)
    results: Results = {
        "benchmark": "scheduled_pull_serving",
        "name": "scheduled_pull_serving",
        "machine": found_machine,
        "settings": settings,
        "rows": rows,
        "targets": targets(rows),
    }
    records.publish(results, command_line.results_folder(chosen), REPORTS)
    return 0
