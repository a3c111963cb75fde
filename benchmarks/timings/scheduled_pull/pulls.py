"""Time that steps wait for pulled models, and ages of these models, over links of different rates.

  python benchmarks/scheduled_pull.py pulls                # as root, in a clone: it makes hosts and starts the ranks

Four emulated hosts have one rank each; 0, 2 and 4 of them have links of 10 Gbps, the others of 1 Gbps. A step sleeps,
because the hosts share this machine's cores; then it changes parameters (3.5 MiB with --model small, 25 MiB with
--model large). A window has 16 steps. Contestants take turns in one job for each number of wide links:
  alone         the steps without communication
  none          scheduled pull gossip that pulls at the end of a window
  naive         the same with pulls that begin with the window
  manager       the same with pulls that end with the window, scheduled by a manager
  autonomous    the same with a schedule that the workers agree on
  local_sgd     LocalSGD that averages all models every 16 steps by AllReduce
  crossover     Crossover every 16 steps
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cluster.jobs import failed, machine_before, run_on_hosts, wrong_contestants
from sordino.bench import command_line
from sordino.errors import SordinoError
from sordino.report import Results, records, verdicts
from sordino.report.tables import format_seconds
from sordino.timing import summarize
from timings.scheduled_pull.report import REPORTS
from timings.scheduled_pull.serving import words_of

INTERVAL = 16
HOSTS = 4
NARROW, WIDE = 1000.0, 10000.0  # Mbps
_WORKER = "timings.scheduled_pull.pulls_worker"
_MODELS = {  # as in the source, a pull over a narrow link takes less than a window
    "small": {"model-bytes": 3670016, "compute-ms": 10.0, "rounds": 5, "warm-up": 3, "windows": 10},
    "large": {"model-bytes": 25 << 20, "compute-ms": 30.0, "rounds": 3, "warm-up": 3, "windows": 6},
}
_QUICK = {"model-bytes": 1 << 20, "compute-ms": 4.0, "rounds": 1, "warm-up": 3, "windows": 4}
_SCHEDULED = ("manager", "autonomous")


def row_of(job: Results, wide: int, model_bytes: int) -> Results:
    """Return the results of a job: medians and quartiles over the rounds (of means over the ranks) and over all pulls.

    The values of each rank and round are kept too.
    """
    entries: dict[str, Results] = {}
    for name, rounds in job["rounds"].items():
        one: Results = {"right": all(told["right"] for turn in rounds for told in turn)}
        for key in ("step", "waited", "bytes"):
            one[key] = summarize(np.array([np.mean([told[key] for told in turn]) for turn in rounds]))
        alone = [np.mean([told["step"] for told in turn]) for turn in job["rounds"]["alone"]]
        steps = [np.mean([told["step"] for told in turn]) for turn in rounds]
        one["over_alone"] = summarize(np.array(steps) / np.array(alone))
        pulled = [told for turn in rounds for told in turn if "ages" in told]
        if pulled:
            for key in ("pulls", "failed", "messages", "unpublished"):
                one[key] = float(np.mean([told[key] for told in pulled]))
            one |= _of_pulls(pulled)
        one["rounds"] = rounds
        entries[name] = one
    places = {key: job[key] for key in ("hosts", "ranks_per_host", "ranks", "job_bytes")}
    return places | {"wide": wide, "model_bytes": model_bytes, "contestants": entries}


def _of_pulls(pulled: Sequence[Results]) -> Results:
    """Return the ages and the durations of all pulls, and their differences, in seconds."""
    keys = ("ages", "seconds", "behind")
    ages, seconds, behind = (np.array([value for told in pulled for value in told[key]]) for key in keys)
    if ages.size == 0:
        return {}
    found: Results = {"age": summarize(ages), "pull": summarize(seconds), "beyond": summarize(ages - seconds)}
    return found | {"behind": {"mean": float(behind.mean()), "deviation": float(behind.std())}}


def targets(rows: Sequence[Results]) -> list[Results]:
    """Return the targets: steps nearly as fast as alone, little waiting, and fresher models than with naive overlap."""
    entries = []
    for row in rows:
        where, found = f"{row['wide']} of {row['hosts']} links wide", row["contestants"]
        for name in _SCHEDULED:
            value = found[name]["over_alone"]["median"]
            entries.append(verdicts.target(f"{where}: a step of {name}, over alone", value, 1.05, at_least=False))
            value = found[name]["waited"]["median"] / found["none"]["waited"]["median"]
            entries.append(
                verdicts.target(f"{where}: waiting of {name}, over that of none", value, 0.1, at_least=False)
            )
            value = found[name]["age"]["median"] / found["naive"]["age"]["median"]
            entries.append(verdicts.target(f"{where}: age of {name}, over that of naive", value, 0.9, at_least=False))
    return entries


def main(argv: Sequence[str] | None = None) -> int:
    """Start the jobs. Status 1 if a job failed or has a wrong result, 2 if no cluster can be made."""
    options = command_line.parser("scheduled_pull pulls", __doc__, 0.0, "(not used)")
    options.add_argument("--model", choices=_MODELS, default="small", help="3.5 or 25 MiB (default small)")
    options.add_argument(
        "--wide", default="", metavar="LIST", help="numbers of wide links (default 0,2,4; --quick: 1 of 2)"
    )
    chosen = options.parse_args(argv)
    settings = (_QUICK if chosen.quick else _MODELS[chosen.model]) | {"interval": INTERVAL}
    words = words_of(settings)
    hosts = 2 if chosen.quick else HOSTS
    wides = [int(text) for text in (chosen.wide or ("1" if chosen.quick else "0,2,4")).split(",")]
    if not all(0 <= wide <= hosts for wide in wides):
        options.error(f"--wide {chosen.wide}: there are {hosts} links")
    found_machine = machine_before()
    rows: list[Results] = []
    try:
        for wide in wides:
            rates = [WIDE] * wide + [NARROW] * (hosts - wide)
            row = row_of(run_on_hosts(hosts, 1, rates, _WORKER, words), wide, int(settings["model-bytes"]))
            rows.append(row)
            for name, one in row["contestants"].items():
                keys = [key for key in ("step", "waited", "age", "pull") if key in one]
                times = [f"{key} {format_seconds(one[key]['median'])}" for key in keys]
                records.log(f"{wide} wide: {name}: {', '.join(times)}")
    except SordinoError as error:
        return failed("scheduled_pull", error)
    wrong = wrong_contestants(rows)
    results: Results = {
        "benchmark": "scheduled_pull_pulls",
        "name": f"scheduled_pull_pulls_{'quick' if chosen.quick else chosen.model}",
        "machine": found_machine,
        "mbps": {"narrow": NARROW, "wide": WIDE},
        "settings": settings,
        "rows": rows,
        "wrong": wrong,
        "targets": targets(rows),
    }
    records.publish(results, command_line.results_folder(chosen), REPORTS)
    return 1 if wrong else 0
