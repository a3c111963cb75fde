"""Figures 6 and 7 and Table 1: accuracies by learning rate and mini-batch."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

from claims.claim import Claim, Found, Plan
from claims.evidence import above, differences, exact
from claims.gossip.methods import (
    COLOURS,
    COMPARED,
    FULL,
    METHODS,
    QUICK,
    Point,
    accuracies,
    best_rates,
    crossover_above,
    draw,
    shapes,
    training,
)
from claims.papers import CROSSOVER
from sordino.report import Results

# ---- Figure 6: effect of the learning rate on the accuracy of each method ----


BATCH, FIGURE_6_WORKERS, FIGURE_6_SEEDS = 2048, 8, 10
FIGURE_6_RATES = (0.05, 0.1, 0.2, 0.4, 0.8)
COLLAPSED = 50.0  # percent; trainings that did not collapse have more than 70
_SHOWN = 12.0  # points that the picture shows below the best accuracy


def plan_figure_6(quick: bool) -> Plan:
    """Train every method at every rate. Compare deviations over the rates without a collapse, seed by seed."""
    task, batch, workers, rates, seeds = (
        (QUICK, 64, 4, (0.1, 0.2), 2) if quick else (FULL, BATCH, FIGURE_6_WORKERS, FIGURE_6_RATES, FIGURE_6_SEEDS)
    )
    every = range(1, seeds + 1)
    keys = [(name, lr, seed) for name in COMPARED for lr in rates for seed in every]
    found = yield [training(Point(name, workers, batch), lr, seed, task).run for name, lr, seed in keys]
    tests = {key: 100 * one["test"] for key, one in zip(keys, found, strict=True)}
    sound = [(lr, s) for lr in rates for s in every if all(tests[name, lr, s] > COLLAPSED for name in COMPARED)]
    spreads: dict[str, list[float]] = {}
    for name in COMPARED:
        left = [[tests[name, lr, seed] for lr, other in sound if other == seed] for seed in every]
        spreads[name] = [statistics.pstdev(one) if one else 0.0 for one in left]
    collapsed = {name: sum(tests[name, lr, s] <= COLLAPSED for lr in rates for s in every) for name in COMPARED}
    pairs = (("allreduce", "crossover"), ("push-sum", "crossover"), ("allreduce", "push-sum"))
    evidence = [
        above(
            f"{METHODS[one]} - {METHODS[other]}: deviation over the learning rates, points",
            differences(spreads[one], spreads[other]),
        )
        for one, other in pairs
    ]
    evidence.append(
        exact(
            f"Crossover's collapses, of {len(rates) * seeds} trainings; not more than AllReduce's",
            collapsed["crossover"],
            collapsed["crossover"] <= collapsed["allreduce"],
            note=", ".join(f"{METHODS[name]} {count}" for name, count in collapsed.items()) + " collapsed",
        )
    )
    for lr in rates:
        gap = [tests["crossover", lr, seed] - tests["allreduce", lr, seed] for rate, seed in sound if rate == lr]
        what = f"Learning rate {lr:g}: Crossover - AllReduce, points"
        evidence.append(above(what, gap, collapsed=seeds - len(gap)))
    by_rate = {name: [[tests[name, lr, seed] for seed in every] for lr in rates] for name in COMPARED}
    return Found(evidence, {"rates": list(rates), "tests": by_rate})


def draw_figure_6(shapes: Results, figure: Any) -> None:
    """Draw accuracy against the learning rate, one point per seed. Collapsed trainings are at the bottom."""
    axes = figure.subplots()
    floor = max(max(one) for tests in shapes["tests"].values() for one in tests) - _SHOWN
    for place, (name, tests) in enumerate(shapes["tests"].items()):
        shown = [[max(test, floor) for test in one] for one in tests]
        shifted = [lr * 2 ** (0.06 * (place - 1)) for lr in shapes["rates"]]  # so that points do not cover each other
        axes.plot(shifted, [statistics.median(one) for one in shown], color=COLOURS[name], label=METHODS[name])
        for lr, one in zip(shifted, shown, strict=True):
            axes.plot([lr] * len(one), one, ".", color=COLOURS[name], alpha=0.5)
    axes.set_xscale("log", base=2)
    axes.set_xticks(shapes["rates"], [f"{lr:g}" for lr in shapes["rates"]])
    axes.set(
        xlabel="learning rate; points are seeds (lower ones at the bottom), lines medians", ylabel="test accuracy, %"
    )
    axes.legend(frameon=False)


FIGURE_6_CLAIM = Claim(
    name="crossover-figure-6",
    paper=CROSSOVER,
    place="Figure 6",
    says="When the learning rate changes, Crossover's accuracy changes least, and AllReduce's most.",
    setting="ResNet-50 on ImageNet, mini-batches up to 86,016, each at several learning rates.",
    here=f"Mini-batches of {BATCH}, {FIGURE_6_WORKERS} workers, learning rates from {FIGURE_6_RATES[0]:g} to "
    f"{FIGURE_6_RATES[-1]:g}, {FIGURE_6_SEEDS} seeds. Rates at which one of the three methods collapses are left out "
    "of a seed's deviation.",
    plan=plan_figure_6,
    why="The source's figure shows the deviation over the rates. Here it is not told apart, because it depends on "
    "single trainings: at 0.4 one of AllReduce's ends at 77.7 %, another at 81.6 %, and eight above 84 %. Rate by rate "
    "the source is right. At the best rate all are equal. At twice that rate Crossover is 0.4 points above AllReduce, "
    "at four times 1.7. At eight times all ten of AllReduce's trainings collapse and six of Crossover's. SGP has as "
    "many collapses, and a deviation that is at most 0.12 points larger: gossip bears high rates, with or without "
    "segments.",
    draw=draw_figure_6,
)


# ---- Figure 7: accuracy against the global mini-batch at a fixed number of workers ----


FIGURE_7_BATCHES, FIGURE_7_WORKERS, FIGURE_7_SEEDS = (512, 1024, 2048), 8, 10
FIGURE_7_RATES = (0.05, 0.1, 0.2, 0.4)


def plan_figure_7(quick: bool) -> Plan:
    """Choose rates by validation, then train every method at every mini-batch."""
    task, batches, workers, rates, seeds = (
        (QUICK, (64, 128), 4, (0.1,), 2)
        if quick
        else (FULL, FIGURE_7_BATCHES, FIGURE_7_WORKERS, FIGURE_7_RATES, FIGURE_7_SEEDS)
    )
    points = [Point(name, workers, batch) for batch in batches for name in COMPARED]
    best = yield from best_rates(points, rates, seeds, task)
    tests = yield from accuracies(best, seeds, task)
    least, most = batches[0], batches[-1]
    lost = {
        name: differences(tests[Point(name, workers, least)], tests[Point(name, workers, most)]) for name in COMPARED
    }
    evidence = [
        above(
            f"From {least} to {most}, AllReduce loses more than {METHODS[name]}, points",
            differences(lost["allreduce"], lost[name]),
        )
        for name in ("crossover", "push-sum")
    ]
    evidence += crossover_above(tests, workers, batches)
    return Found(evidence, {"points": shapes(tests, best)})


FIGURE_7_CLAIM = Claim(
    name="crossover-figure-7",
    paper=CROSSOVER,
    place="Figure 7",
    says="With larger mini-batches AllReduce loses accuracy; SGP and Crossover lose less, and Crossover is best.",
    setting="ResNet-50 on ImageNet, mini-batches up to 86,016, each method at its best learning rate.",
    here=f"Mini-batches of 512 to 2048 with {FIGURE_7_WORKERS} workers, each method at the best of "
    f"{len(FIGURE_7_RATES)} rates; {FIGURE_7_SEEDS} seeds.",
    plan=plan_figure_7,
    why="Here AllReduce loses nothing that gossip could win back. At the best rate of each size it has 85.8 % with "
    "mini-batches of 512 and of 2048, although the latter hold a sixth of all images and leave 504 steps. A loss by "
    "large mini-batches may need a deeper network or more data. The remaining differences are small: with 1024 "
    "Crossover is half a point above AllReduce, which is worse there than at both other sizes; with 2048 it is a "
    "seventh of a point below SGP. No method is best at all sizes.",
    draw=partial(draw, "batch", "global mini-batch"),
)


# ---- Table 1: the recipe for large mini-batches with which the source's figures are made ----


TABLE_1_BATCHES, TABLE_1_WORKERS, TABLE_1_SEEDS = (512, 2048), 8, 10
TABLE_1_RATES = (1.0, 2.0, 4.0, 8.0, 16.0)


def plan_table_1(quick: bool) -> Plan:
    """Train with the recipe, and with the larger mini-batch AllReduce also without it."""
    task, batches, workers, rates, seeds = (
        (QUICK, (64, 128), 4, (8.0,), 2)
        if quick
        else (FULL, TABLE_1_BATCHES, TABLE_1_WORKERS, TABLE_1_RATES, TABLE_1_SEEDS)
    )
    points = [Point(name, workers, batch) for batch in batches for name in COMPARED]
    best = yield from best_rates(points, rates, seeds, task, "large-batch")
    tests = yield from accuracies(best, seeds, task, "large-batch")
    plain = Point("allreduce", workers, batches[-1])
    rate = yield from best_rates([plain], (0.05, 0.1, 0.2, 0.4), seeds, task)
    without = (yield from accuracies(rate, seeds, task))[plain]
    what = f"Mini-batches of {batches[-1]}, AllReduce: with the recipe - without, points"
    evidence = [above(what, differences(tests[plain], without))]
    evidence += crossover_above(tests, workers, batches, ", with the recipe")
    return Found(evidence, {"points": shapes(tests, best)})


TABLE_1_CLAIM = Claim(
    name="crossover-table-1",
    paper=CROSSOVER,
    place="Table 1",
    says="The recipe for large mini-batches (LARS, labels smoothed by 0.1, warm-up) keeps AllReduce's accuracy there, "
    "and Crossover is best with it too.",
    setting="ResNet-50 on ImageNet, 75.67 % with mini-batches of 86,016.",
    here=f"The same recipe on mini-batches of {TABLE_1_BATCHES[0]} and {TABLE_1_BATCHES[1]}, {TABLE_1_WORKERS} "
    f"workers, at the best of {len(TABLE_1_RATES)} learning rates; {TABLE_1_SEEDS} seeds.",
    plan=plan_table_1,
    why="With mini-batches of 2048 AllReduce has 85.9 % with the recipe and 85.8 % without it: there is no loss that "
    "the recipe could prevent (Figure 7). Crossover is 0.3 points above AllReduce with mini-batches of 512. With 2048 "
    "it is not told apart from AllReduce, nor from SGP at either size. The rate matters more than the method: "
    "AllReduce collapses at four times its best rate, where Crossover still reaches 86 %, as in Figure 6. So three "
    "seeds choose each rate, because the best rate of one seed may be too high for others.",
    draw=partial(draw, "batch", "global mini-batch, with the recipe"),
)
