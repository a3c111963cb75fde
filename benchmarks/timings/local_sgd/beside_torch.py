"""Local SGD against PyTorch's PostLocalSGDOptimizer with a PeriodicModelAverager over Gloo.

  python benchmarks/local_sgd.py torch        # as root, in a clone: on this machine and on emulated hosts

Four ranks take real steps of SGD with momentum on the parameters of ResNet-20 and of ResNet-50. The loss is a sum over
the parameters. Models are averaged every 4 steps. Groups of one rank send nothing else. In groups of two, PyTorch
averages gradients over the group by DDP's post-local hook. Contestants take turns in one job.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.jobs import failed, machine_before, run_here, run_on_hosts
from sordino.bench import command_line
from sordino.errors import SordinoError
from sordino.report import Results, records, verdicts
from timings.local_sgd.beside_torch_worker import INTERVAL, SETS
from timings.local_sgd.report import REPORTS

RANKS = 4
_WORKER = "timings.local_sgd.beside_torch_worker"


def targets(rows: Sequence[Results]) -> list[Results]:
    """Return the targets: never slower than PyTorch."""
    return [
        verdicts.target(f"{row['set']}, K={row['members']}, {row['place']}: PyTorch over {name}", ratio, 1.0, True)
        for row in rows
        for name, ratio in row["ratios"].items()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Start the jobs. Status 1 if a job failed or has a wrong result, 2 if no cluster can be made."""
    options = command_line.parser("local_sgd torch", __doc__, 20.0, "job")
    options.add_argument("--mbps", type=float, default=500.0, metavar="RATE", help="of each link (default 500)")
    chosen = options.parse_args(argv)
    found_machine = machine_before()
    rows: list[Results] = []
    budget = 1.0 if chosen.quick else chosen.budget
    try:
        for name in ("resnet20",) if chosen.quick else SETS:
            for members in (1, 2):
                words = ["--set", name, "--members", str(members), "--budget", f"{budget:g}"]
                for place in ("here",) if chosen.quick else ("here", "hosts"):
                    if place == "here":
                        row = run_here(RANKS, _WORKER, words)
                    else:
                        row = run_on_hosts(RANKS, 1, chosen.mbps, _WORKER, words)
                    rows.append(row | {"place": place})
                    records.log(f"{name}, K={members}, {place}: {row['ratios']}")
    except SordinoError as error:
        return failed("local_sgd", error)
    wrong = sorted({name for row in rows for name in row["wrong"]})
    results: Results = {
        "benchmark": "local_sgd_torch",
        "name": "local_sgd_torch",
        "machine": found_machine,
        "mbps": chosen.mbps,
        "interval": INTERVAL,
        "ranks": RANKS,
        "rows": rows,
        "baselines": rows[0]["notes"],
        "wrong": wrong,
        "targets": targets(rows),
    }
    records.publish(results, command_line.results_folder(chosen), REPORTS)
    return 1 if wrong else 0
