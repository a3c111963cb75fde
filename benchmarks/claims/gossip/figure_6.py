"""Figure 6: how much each method's accuracy depends on the learning rate."""

from __future__ import annotations

import itertools
import statistics
from typing import Any

from claims.claim import Claim, Found, Plan
from claims.evidence import above, differences, exact
from claims.gossip.methods import COLOURS, FULL, METHODS, QUICK, Point, training
from claims.papers import CROSSOVER
from sordino.report import Results

BATCH, WORKERS, SEEDS = 2048, 8, 10
RATES = (0.05, 0.1, 0.2, 0.4, 0.8)
COLLAPSED = 50.0  # percent; the others have more than 70
_SHOWN = 12.0  # points below the best, in the picture
_COMPARED = ("allreduce", "push-sum", "crossover")


def plan(quick: bool) -> Plan:
    """Every method at every rate; the spread over the rates at which none has collapsed, seed by seed."""
    task, batch, workers, rates, seeds = (
        (QUICK, 64, 4, (0.1, 0.2), 2) if quick else (FULL, BATCH, WORKERS, RATES, SEEDS)
    )
    keys = [(name, lr, seed) for name in _COMPARED for lr in rates for seed in range(1, seeds + 1)]
    found = yield [training(Point(name, workers, batch), lr, seed, task).run for name, lr, seed in keys]
    tests = {key: 100 * one["test"] for key, one in zip(keys, found, strict=True)}
    pairs = itertools.product(rates, range(1, seeds + 1))
    sound = [(lr, seed) for lr, seed in pairs if all(tests[name, lr, seed] > COLLAPSED for name in _COMPARED)]
    spreads: dict[str, list[float]] = {name: [] for name in _COMPARED}
    for seed in range(1, seeds + 1):
        for name in _COMPARED:
            left = [tests[name, lr, seed] for lr, other in sound if other == seed]
            spreads[name].append(statistics.pstdev(left) if left else 0.0)
    collapsed = {name: sum(tests[name, lr, s] <= COLLAPSED for n, lr, s in keys if n == name) for name in _COMPARED}
    spread = "deviation over the learning rates, points"
    evidence = [
        above(f"AllReduce - Crossover: {spread}", differences(spreads["allreduce"], spreads["crossover"])),
        above(f"SGP - Crossover: {spread}", differences(spreads["push-sum"], spreads["crossover"])),
        above(f"AllReduce - SGP: {spread}", differences(spreads["allreduce"], spreads["push-sum"])),
        exact(
            f"Crossover's collapses, of {len(rates) * seeds} trainings; not more than AllReduce's",
            collapsed["crossover"],
            collapsed["crossover"] <= collapsed["allreduce"],
            note=", ".join(f"{METHODS[name]} {count}" for name, count in collapsed.items()) + " collapsed",
        ),
    ]
    for lr in rates:
        gap = [tests["crossover", lr, seed] - tests["allreduce", lr, seed] for rate, seed in sound if rate == lr]
        what = f"Learning rate {lr:g}: Crossover - AllReduce, points"
        evidence.append(above(what, gap, collapsed=seeds - len(gap)))
    by_rate = {name: [[tests[name, lr, s] for s in range(1, seeds + 1)] for lr in rates] for name in _COMPARED}
    return Found(evidence, {"rates": list(rates), "tests": by_rate})


def draw(shapes: Results, figure: Any) -> None:
    """Accuracy against the learning rate, a point a seed; collapses lie at the bottom."""
    axes = figure.subplots()
    floor = max(max(one) for tests in shapes["tests"].values() for one in tests) - _SHOWN
    for place, (name, tests) in enumerate(shapes["tests"].items()):
        shown = [[max(test, floor) for test in one] for one in tests]
        beside = [lr * 2 ** (0.06 * (place - 1)) for lr in shapes["rates"]]  # so that points do not cover each other
        axes.plot(beside, [statistics.median(one) for one in shown], color=COLOURS[name], label=METHODS[name])
        for lr, one in zip(beside, shown, strict=True):
            axes.plot([lr] * len(one), one, ".", color=COLOURS[name], alpha=0.5)
    axes.set_xscale("log", base=2)
    axes.set_xticks(shapes["rates"], [f"{lr:g}" for lr in shapes["rates"]])
    axes.set_xlabel("learning rate; a point is a seed, at the bottom if it is lower; a line the median")
    axes.set_ylabel("test accuracy, %")
    axes.legend(frameon=False)


CLAIM = Claim(
    name="crossover-figure-6",
    paper=CROSSOVER,
    place="Figure 6",
    says="When the learning rate changes, Crossover's accuracy changes least, and AllReduce's most.",
    setting="ResNet-50 on ImageNet, mini-batches up to 86,016, each at several learning rates.",
    here=f"Mini-batches of {BATCH}, {WORKERS} workers, learning rates from {RATES[0]:g} to {RATES[-1]:g}, {SEEDS} "
    "seeds. Rates at which one of the three collapses are left out of a seed's deviation.",
    plan=plan,
    why="The deviation over the rates, by which the source's figure is read, is not told apart, because it hangs on "
    "single trainings: at 0.4 one of AllReduce's ends at 77.7 %, another one at 81.6, eight above 84. Rate by "
    "rate the source is right: at the rate that suits all best they are equal, at twice that Crossover is 0.4 "
    "points above AllReduce, at four times 1.7, and at eight times all ten of AllReduce's trainings collapse and "
    "six of Crossover's. SGP has as many collapses, and a deviation that is at most 0.12 points larger: it is "
    "gossip that bears high rates, hardly the segments.",
    draw=draw,
)
