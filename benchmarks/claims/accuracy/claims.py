"""What trainings say: the learning rate that each method does best with, and which of the source's claims hold."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from sordino.report import Results

METHODS = {"allreduce": "AllReduce", "sgp": "SGP", "crossover": "Crossover", "hierarchical": "hierarchical Crossover"}

Runs = Sequence[Results]


def points(runs: Runs) -> list[Results]:
    """Each method at each number of workers and mini-batch, at the learning rate that does best in validation.

    Returns:
        For each point the rate; its test accuracies, their mean and standard deviation (None for one seed); the same of
        the mean over all rates of the grid; the mean consensus distance after an epoch (None if a training diverged);
        and the mean accuracies by rate.
    """
    found = []
    for name, workers, batch in dict.fromkeys((run["algorithm"], run["workers"], run["batch"]) for run in runs):
        here = [run for run in runs if (run["algorithm"], run["workers"], run["batch"]) == (name, workers, batch)]
        rates, seeds = (sorted({run[key] for run in here}) for key in ("lr", "seed"))
        means = {
            part: {lr: statistics.fmean(run[part] for run in here if run["lr"] == lr) for lr in rates}
            for part in ("validation", "test")
        }
        best = max(rates, key=lambda lr: means["validation"][lr])
        chosen = [run for run in here if run["lr"] == best]
        distances = [distance for run in chosen for distance in run["consensus_distance"]]
        over_rates = [statistics.fmean(run["test"] for run in here if run["seed"] == seed) for seed in seeds]
        found.append(
            {
                "algorithm": name,
                "workers": workers,
                "batch": batch,
                "lr": best,
                "at_the_edge": len(rates) > 1 and best in (rates[0], rates[-1]),
                **_summary([run["test"] for run in chosen]),
                "over_rates": _summary(over_rates),
                "consensus_distance": None if None in distances else statistics.fmean(distances),
                **{f"{part}_by_rate": {f"{lr:g}": mean for lr, mean in means[part].items()} for part in means},
            }
        )
    return found


def _summary(test: Sequence[float]) -> Results:
    deviation = statistics.stdev(test) if len(test) > 1 else None
    return {"test": list(test), "mean": statistics.fmean(test), "std": deviation}


def at(found: Runs, algorithm: str, workers: int, batch: int) -> Results:
    """The point of a method."""
    wanted = (algorithm, workers, batch)
    return next(point for point in found if (point["algorithm"], point["workers"], point["batch"]) == wanted)


def judge(figure: int, what: str, plus: Runs, minus: Runs, alike: bool = False) -> Results:
    """A claim that some accuracies together exceed others or, if `alike`, that they do not differ.

    The spread is the standard deviation of such a difference between single trainings.
    """
    difference = sum(point["mean"] for point in plus) - sum(point["mean"] for point in minus)
    deviations = [point["std"] for point in (*plus, *minus)]
    if None in deviations:
        return {"figure": figure, "what": what, "difference": difference, "spread": None, "verdict": "not judged"}
    spread = math.hypot(*deviations)
    within = abs(difference) <= spread
    verdict = "holds" if (within if alike else difference > 0) else "does not hold"
    if within and not alike:
        verdict = "within the spread"
    return {"figure": figure, "what": what, "difference": difference, "spread": spread, "verdict": verdict}


def claims(found: Runs, plan: dict[str, Any]) -> list[Results]:
    """The source's claims about Figures 6 to 8, judged at the points of a plan."""
    workers, batches = plan["batch_figure"]["workers"], plan["batch_figure"]["batches"]
    least, most = batches[0], batches[-1]
    entries = []
    for batch in batches:
        over = {name: at(found, name, workers, batch)["over_rates"] for name in METHODS}
        for name in ("allreduce", "sgp"):
            what = f"Batch {batch}: Crossover above {METHODS[name]}, mean over all learning rates"
            entries.append(judge(6, what, [over["crossover"]], [over[name]]))
    all_reduce = {batch: at(found, "allreduce", workers, batch) for batch in batches}
    for name in ("sgp", "crossover", "hierarchical"):
        what = f"From batch {least} to {most}, AllReduce loses more than {METHODS[name]}"
        other = [at(found, name, workers, batch) for batch in (least, most)]
        entries.append(judge(7, what, [all_reduce[least], other[1]], [all_reduce[most], other[0]]))
    for batch in batches:
        ours = at(found, "crossover", workers, batch)
        for name in ("allreduce", "sgp"):
            what = f"Batch {batch}: Crossover above {METHODS[name]}"
            entries.append(judge(7, what, [ours], [at(found, name, workers, batch)]))
    batch, counts = plan["worker_figure"]["batch"], plan["worker_figure"]["workers"]
    for name in ("sgp", "crossover"):
        few, many = (at(found, name, count, batch) for count in (counts[0], counts[-1]))
        entries.append(judge(8, f"{METHODS[name]} loses from {counts[0]} to {counts[-1]} workers", [few], [many]))
    for count in counts:
        one, sgp, grouped, base = (
            at(found, name, count, batch) for name in ("crossover", "sgp", "hierarchical", "allreduce")
        )
        entries.append(judge(8, f"{count} workers: Crossover above SGP", [one], [sgp]))
        what = f"{count} workers: hierarchical Crossover like AllReduce"
        entries.append(judge(8, what, [grouped], [base], alike=True))
        what = f"{count} workers: hierarchical Crossover above Crossover"
        entries.append(judge(8, what, [grouped], [one]))
    return entries
