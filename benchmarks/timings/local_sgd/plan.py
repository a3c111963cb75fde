"""Accuracy of the predictions of `sordino plan` for every algorithm on emulated hosts.

  python benchmarks/local_sgd.py plan                     # as root, in a clone: by mpirun, over MPI
  python benchmarks/local_sgd.py plan --starter torchrun  # over UCX

Makes several plans on each of four kinds of clusters, with links of --mbps each way. Each plan measures alpha and beta
again, and runs each algorithm after its prediction.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cluster.jobs import failed, machine_before, run_on_hosts
from sordino.bench import command_line
from sordino.errors import SordinoError
from sordino.report import Results, records, verdicts
from timings.local_sgd.report import REPORTS

_NAMES = {"mpirun": "local_sgd_plan", "torchrun": "local_sgd_plan_ucx"}  # names of the results by launcher
_CLUSTERS = ((2, 1), (4, 1), (4, 2), (8, 1))  # hosts, and ranks on each


def errors(rows: Sequence[Results]) -> dict[str, Results]:
    """Return the relative errors by algorithm: median absolute, largest, count."""
    found: dict[str, list[float]] = {}
    for row in rows:
        for one in row["rows"]:
            if one["error"] is not None:
                found.setdefault(one["name"], []).append(one["error"])
    return {
        name: {"median": float(np.median(np.abs(values))), "most": max(values, key=abs), "count": len(values)}
        for name, values in sorted(found.items())
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Make the plans. Status 1 if one failed, 2 if no cluster can be made."""
    options = command_line.parser("local_sgd plan", __doc__, 60.0, "plan")
    options.add_argument("--mbps", type=float, default=500.0, metavar="RATE", help="of each link (default 500)")
    options.add_argument("--parameters", default="2.5M", metavar="N", help="of the model (default 2.5M)")
    options.add_argument("--repeats", type=int, default=3, metavar="N", help="plans on each cluster (default 3)")
    options.add_argument("--starter", choices=_NAMES, default="mpirun", help="of the ranks (default mpirun)")
    chosen = options.parse_args(argv)
    found_machine = machine_before()
    rows: list[Results] = []
    budget = 3.0 if chosen.quick else chosen.budget
    words = ["plan", "--parameters", chosen.parameters, "--data", "none", "--budget", f"{budget:g}", "--json"]
    try:
        for _ in range(1 if chosen.quick else chosen.repeats):
            for hosts, each in _CLUSTERS[:1] if chosen.quick else _CLUSTERS:
                rows.append(run_on_hosts(hosts, each, chosen.mbps, "sordino.cli", words, chosen.starter))
                middle = np.median([abs(one["error"]) for one in rows[-1]["rows"] if one["error"] is not None])
                records.log(f"{hosts} hosts, {each} rank(s) each: median error {middle:.0%}")
    except SordinoError as error:
        return failed("local_sgd", error)
    found = errors(rows)
    results: Results = {
        "benchmark": "local_sgd_plan",
        "name": _NAMES[chosen.starter],
        "machine": found_machine,
        "starter": chosen.starter,
        "mbps": chosen.mbps,
        "parameters": rows[0]["parameters"],
        "rows": rows,
        "errors": found,
        "targets": [
            verdicts.target(f"{name}: median error of {one['count']} predictions", one["median"], 0.2, at_least=False)
            for name, one in found.items()
        ],
    }
    records.publish(results, command_line.results_folder(chosen), REPORTS)
    return 0
