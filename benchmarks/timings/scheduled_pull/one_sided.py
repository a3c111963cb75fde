"""Two ways to get bytes from a rank that computes: a request that its progress thread answers, and MPI_Get.

  python benchmarks/scheduled_pull.py one_sided            # as root, in a clone: two of the jobs are on emulated hosts

Rank 1 computes for --turn-ms. Meanwhile rank 0 gets the same bytes from it again and again:
  snapshot       a pull as in scheduled pull gossip: on one machine a copy, otherwise request and reply
  get            MPI_Get under MPI_Win_lock, with a window of MPI_Win_create; rank 1 makes no MPI call
  get_calls      the same while rank 1 calls MPI_Iprobe every millisecond
  get_allocated  like get, with a window of MPI_Win_allocate
  get_beside     like get, while Sordino is initialized, whose progress thread also calls MPI
  nobody         no gets, to measure the undisturbed computation of rank 1
A Get that lasts until rank 1 has finished computing and calls MPI again is marked as late: --turn-ms sets its time.
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
from timings.scheduled_pull.report import GETS, REPORTS, where
from timings.scheduled_pull.serving import PLACES, words_of

_WORKER = "timings.scheduled_pull.one_sided_worker"
_FULL = {"sizes": (64 << 10, 3670016, 25 << 20), "turn-ms": 700.0, "rounds": 5}
_QUICK = {"sizes": (256 << 10,), "turn-ms": 150.0, "rounds": 1}


def rows_of(job: Results, mbps: float | None) -> list[Results]:
    """Return one row per size: times and number of late turns of each way, and ratios to `snapshot`."""
    rows = []
    for size in job["sizes"]:
        ways: dict[str, Results] = {}
        for name, turns in size["ways"].items():
            seconds = np.array([value for turn in turns for value in turn["seconds"]])
            one: Results = {"late": sum(turn["late"] for turn in turns), "turns": len(turns)}
            one["computed"] = summarize(np.array([turn["pieces"] for turn in turns]))
            if seconds.size:
                one["seconds"] = summarize(seconds)
            ways[name] = one
        ratios = {}
        for name in GETS:
            if "seconds" in ways.get(name, {}) and "seconds" in ways["snapshot"]:
                ratios[name] = ways[name]["seconds"]["median"] / ways["snapshot"]["seconds"]["median"]
        row = {"bytes": size["bytes"], "mbps": mbps, "cores_per_rank": job["cores_per_rank"], "ways": ways}
        rows.append(row | {"right": size["right"], "ratios": ratios})
    return rows


def targets(rows: Sequence[Results]) -> list[Results]:
    """Return the targets: a snapshot must be no slower than a Get while rank 1 computes."""
    entries = []
    for row in rows:
        place, ratios = f"{format_bytes(row['bytes'])}, {where(row)}", row["ratios"]
        what = f"{place}: MPI_Get from a rank that makes no MPI call, over snapshot"
        entries.append(verdicts.target(what, ratios.get("get"), 1.0, at_least=True))
        what = f"{place}: the same of an allocated window"
        entries.append(verdicts.target(what, ratios.get("get_allocated"), 0.95, at_least=True))
    return entries


def main(argv: Sequence[str] | None = None) -> int:
    """Start the jobs. Status 1 if a job failed or got wrong bytes, 2 if no cluster can be made."""
    options = command_line.parser("scheduled_pull one_sided", __doc__, 0.0, "(not used)")
    options.add_argument("--turn-ms", type=float, metavar="MS", help="that rank 1 computes in a turn (default 700)")
    chosen = options.parse_args(argv)
    settings = _QUICK if chosen.quick else _FULL
    if chosen.turn_ms is not None:
        settings = settings | {"turn-ms": chosen.turn_ms}
    found_machine = machine_before()
    rows: list[Results] = []
    notes: dict[str, str] = {}
    try:
        for mbps in PLACES[-1:] if chosen.quick else PLACES:
            words = words_of(settings)
            job = run_here(2, _WORKER, words) if mbps is None else run_on_hosts(2, 1, mbps, _WORKER, words)
            notes |= {name: f"not found ({why})" for name, why in job["missing"].items()}
            notes |= {"MPI": job["library"]} if "library" in job else {}
            for row in rows_of(job, mbps):
                rows.append(row)
                times = [
                    f"{name} {format_seconds(one['seconds']['median'])}{' (late)' if one['late'] else ''}"
                    for name, one in row["ways"].items()
                    if "seconds" in one
                ]
                records.log(f"{format_bytes(row['bytes'])}, {where(row)}: {', '.join(times)}")
    except SordinoError as error:
        return failed("scheduled_pull", error)
    wrong = [f"{format_bytes(row['bytes'])} {where(row)}" for row in rows if not row["right"]]
    results: Results = {
        "benchmark": "scheduled_pull_one_sided",
        "name": "scheduled_pull_one_sided",
        "machine": found_machine,
        "baselines": notes,
        "settings": settings,
        "rows": rows,
        "wrong": wrong,
        "targets": targets(rows),
    }
    records.publish(results, command_line.results_folder(chosen), REPORTS)
    return 1 if wrong else 0
