"""Trainings of AllReduce, SGP, Crossover and hierarchical Crossover, each at its best learning rate."""

from __future__ import annotations

import statistics
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from claims.claim import Run
from claims.evidence import Evidence, above, differences
from claims.training import Training
from sordino.report import Results

METHODS = {"allreduce": "AllReduce", "push-sum": "SGP", "crossover": "Crossover", "hierarchical": "hierarchical"}
COLOURS = {"allreduce": "#3d5a80", "push-sum": "#c8553d", "crossover": "#0b6e4f", "hierarchical": "#8d6a9f"}
COMPARED = ("allreduce", "push-sum", "crossover")
GROUPS = 4  # of hierarchical Crossover
_TUNED_BY = 3  # seeds that choose a rate; the best rate of a single seed is often too high for others

FULL: dict[str, Any] = {"data": "fashion-mnist", "images": 12288, "held_out": 5000, "epochs": 84}
QUICK: dict[str, Any] = {"data": "digits", "images": 1024, "held_out": 256, "epochs": 2}


@dataclass(frozen=True)
class Point:
    """A method, its number of workers, and the images in its global mini-batch."""

    method: str
    workers: int
    batch: int


def training(point: Point, lr: float, seed: int, task: dict[str, Any], recipe: str = "sgd") -> Training:
    """Return the training of a method at a learning rate. Crossover draws its peers by the seed."""
    options: Results = {}
    if point.method in ("crossover", "hierarchical"):
        options = {"seed": seed}
    if point.method == "hierarchical":
        options |= {"group_size": max(2, point.workers // GROUPS)}
    name = "crossover" if point.method == "hierarchical" else point.method
    return Training(name, point.workers, point.batch, lr, seed, options=options, recipe=recipe, **task)


def best_rates(
    points: Sequence[Point], rates: Sequence[float], seeds: int, task: dict[str, Any], recipe: str = "sgd"
) -> Generator[Sequence[Run], list[Results], dict[Point, float]]:
    """Ask for each point at each rate; return the rate of each point with the best mean validation accuracy."""
    seeds = min(seeds, _TUNED_BY)
    tried = [(point, lr) for point in points for lr in rates]
    found = yield [training(*key, seed, task, recipe).run for key in tried for seed in range(1, seeds + 1)]
    scores = [one["validation"] for one in found]
    means = {key: statistics.fmean(scores[k * seeds : (k + 1) * seeds]) for k, key in enumerate(tried)}
    best = {}
    for point in points:
        by_rate = {lr: means[point, lr] for lr in rates}
        best[point] = max(by_rate, key=by_rate.__getitem__)
    return best


def accuracies(
    rates: dict[Point, float], seeds: int, task: dict[str, Any], recipe: str = "sgd"
) -> Generator[Sequence[Run], list[Results], dict[Point, list[float]]]:
    """Ask for each point at its rate; return its test accuracies in percent, seed by seed."""
    runs = [training(point, lr, seed, task, recipe).run for point, lr in rates.items() for seed in range(1, seeds + 1)]
    found = yield runs
    tests = [100 * one["test"] for one in found]
    return {point: tests[k * seeds : (k + 1) * seeds] for k, point in enumerate(rates)}


def crossover_above(
    tests: dict[Point, list[float]], workers: int, batches: Sequence[int], how: str = ""
) -> list[Evidence]:
    """Judge whether Crossover is above the two other methods at each mini-batch, the largest first."""
    found = []
    for batch in reversed(batches):
        crossover = tests[Point("crossover", workers, batch)]
        for name in ("allreduce", "push-sum"):
            what = f"Mini-batches of {batch}{how}: Crossover - {METHODS[name]}, points"
            found.append(above(what, differences(crossover, tests[Point(name, workers, batch)])))
    return found


def shapes(tests: dict[Point, list[float]], rates: dict[Point, float]) -> list[Results]:
    """Return all points for `draw`."""
    return [
        {"method": p.method, "workers": p.workers, "batch": p.batch, "lr": rates[p], "test": tests[p]} for p in tests
    ]


def draw(by: str, label: str, shapes: Results, figure: Any) -> None:
    """Draw accuracies with their standard errors against "workers" or "batch" of the points."""
    points, axes = shapes["points"], figure.subplots()
    for method, name in METHODS.items():
        mine = [point for point in points if point["method"] == method]
        if not mine:
            continue
        means = [statistics.fmean(point["test"]) for point in mine]
        errors = [statistics.stdev(point["test"]) / len(point["test"]) ** 0.5 for point in mine]
        axes.errorbar([p[by] for p in mine], means, errors, label=name, color=COLOURS[method], marker="o", capsize=3)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({point[by] for point in points}), sorted({point[by] for point in points}))
    axes.set(xlabel=label, ylabel="test accuracy, %")
    axes.legend(frameon=False)
