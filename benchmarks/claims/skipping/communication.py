"""What steps wait for communication when unchanged parameters are skipped, over slow links.

  python benchmarks/skipping.py communication         # as root, in a clone: it makes hosts and starts the ranks

In jobs on emulated hosts, four with a rank each and two with two, the network of the training part is trained on
Fashion-MNIST, mini-batches of 32 a worker, by each contestant in turn. Steps are measured when skipping has begun:
after 60 of them, 100. Communication is what the ranks wait for it in a step, the slowest counts; ratios are of means,
for the median step is one that skips, or one that does not.
"""

from __future__ import annotations

from collections.abc import Sequence

from claims.skipping.report import REPORTS, over_unskipped, where
from cluster.jobs import failed, machine_before, run_on_hosts, wrong_contestants
from sordino.bench import command_line
from sordino.errors import SordinoError
from sordino.report import Results, records, verdicts
from sordino.report.tables import format_seconds

_WORKER = "claims.skipping.worker"
_PLACES = ((4, 1), (2, 2))  # hosts, ranks on each
_FULL = {"data": "fashion-mnist", "warm-up": 3, "turns": 5, "steps": 20}
_QUICK = {"data": "digits", "warm-up": 1, "turns": 2, "steps": 3}
SOURCE = "6 to 9 % less"  # CaPS


def targets(rows: Sequence[Results]) -> list[Results]:
    """Skipping saves time, whatever finds what to skip."""
    entries = []
    for row in rows:
        for name in ("naive", "random", "history"):
            value = over_unskipped(row, name, "exposed")
            what = f"{where(row)}: communication of {name}, over unskipped (source: {SOURCE})"
            entries.append(verdicts.target(what, value, 1.0, at_least=False))
    return entries


def main(argv: Sequence[str] | None = None) -> int:
    """Starts the jobs. Status 1 if a job failed or computed something wrong, 2 if there can be no cluster."""
    options = command_line.parser("skipping communication", __doc__)
    options.add_argument("--mbps", type=float, default=500.0, metavar="RATE", help="of each link (default 500)")
    options.add_argument("--data-dir", metavar="DIR", help="the folder of the four Fashion-MNIST files")
    chosen = options.parse_args(argv)
    settings = _QUICK if chosen.quick else _FULL
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    words += ["--data-dir", chosen.data_dir] if chosen.data_dir else []
    found_machine = machine_before()
    rows: list[Results] = []
    try:
        for hosts, each in _PLACES[1:] if chosen.quick else _PLACES:
            row = run_on_hosts(hosts, each, chosen.mbps, _WORKER, words)
            rows.append(row)
            for name, one in row["contestants"].items():
                times = ", ".join(f"{key} {format_seconds(one[key]['mean'])}" for key in ("exposed", "rest"))
                records.log(f"{where(row)}: {name}: {times}, {one['bytes'] / 1e3:.4g} kB")
    except SordinoError as error:
        return failed("skipping", error)
    wrong = wrong_contestants(rows)
    results: Results = {
        "benchmark": "skipping_communication",
        "name": "skipping_communication",
        "machine": found_machine,
        "mbps": chosen.mbps,
        "settings": settings,
        "rows": rows,
        "wrong": wrong,
        "targets": targets(rows),
    }
    records.publish(results, command_line.results_folder(chosen), REPORTS)
    return 1 if wrong else 0
