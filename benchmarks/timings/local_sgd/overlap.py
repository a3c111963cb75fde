"""Time of a step of sharded local SGD whose all-gather of parameters overlaps with the code after `step()`.

  python benchmarks/local_sgd.py overlap        # as root, in a clone

A group of two ranks trains a model of equal layers, here and on two emulated hosts with links of --mbps each way. After
`step()` a batch is loaded for 0, 1/2, 1 and 2 times the time of a `step()` that waits for the all-gather, and then
forward begins. Both variants take turns in one job. The results are ratios of the slowest rank's times, overlapped over
waiting: of `step()`, and of all but loading.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.jobs import failed, machine_before, run_here, run_on_hosts, wrong_contestants
from sordino.bench import command_line
from sordino.errors import SordinoError
from sordino.report import Results, records, verdicts
from timings.local_sgd.report import REPORTS

_WORKER = "timings.local_sgd.overlap_worker"


def targets(rows: Sequence[Results]) -> list[Results]:
    """Return the targets: a gain of 10 % between hosts if loading takes a step or more, else a loss of at most 10 %."""
    entries = []
    for row in rows:
        for load, ratios in row["contestants"]["overlap"]["ratios"].items():
            limit = 0.9 if row["place"] == "hosts" and float(load) >= 1 else 1.1
            what = f"{row['place']}, loading {load} steps: all but loading, overlapped over waiting"
            entries.append(verdicts.target(what, ratios["all"], limit, at_least=False))
    return entries


def main(argv: Sequence[str] | None = None) -> int:
    """Start the jobs. Status 1 if a job failed or has a wrong result, 2 if no cluster can be made."""
    options = command_line.parser("local_sgd overlap", __doc__)
    options.add_argument("--mbps", type=float, default=500.0, metavar="RATE", help="of each link (default 500)")
    chosen = options.parse_args(argv)
    found_machine = machine_before()
    layers, width, rounds = (4, 64, 2) if chosen.quick else (6, 768, 15)
    words = ["--layers", str(layers), "--width", str(width), "--rounds", str(rounds)]
    try:
        rows = [run_here(2, _WORKER, words) | {"place": "one machine"}]
        rows.append(run_on_hosts(2, 1, chosen.mbps, _WORKER, words) | {"place": "hosts"})
    except SordinoError as error:
        return failed("local_sgd", error)
    for row in rows:
        ratios = row["contestants"]["overlap"]["ratios"]
        parts = [f"loading {load}: step() {one['step']:.2f}, all {one['all']:.2f}" for load, one in ratios.items()]
        records.log(f"{row['place']}: {'; '.join(parts)}")
    wrong = wrong_contestants(rows)
    results: Results = {
        "benchmark": "local_sgd_overlap",
        "name": "local_sgd_overlap",
        "machine": found_machine,
        "mbps": chosen.mbps,
        "bytes": 4 * layers * width * (width + 1),
        "rows": rows,
        "wrong": wrong,
        "targets": targets(rows),
    }
    records.publish(results, command_line.results_folder(chosen), REPORTS)
    return 1 if wrong else 0
