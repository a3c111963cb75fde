"""Learning curves: their distance from no overlap's curve over wide links only, and the time until they rise."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from claims.claim import Found, Plan
from claims.evidence import Evidence, above, below, exact, within
from claims.scheduled_pull.comparison import ALL_WIDE, QUICK, SEEDS, WIDES, Judge, Runs, differences, runs_of
from claims.scheduled_pull.simulations import (
    COLOURS,
    NAMES,
    Simulation,
    Task,
    accuracy_at,
    apart,
    level,
    mean_until,
    reached,
)
from sordino.report import Results

_MARGIN = 0.3  # points: curves that differ by less count as equal
_NEARLY = 0.97  # share of no overlap's level at which a curve has nearly converged
_PICTURED = 60  # intervals of a curve in the picture


def curve_evidence(runs: Runs, task: Task, wides: Sequence[int], elsewhere: Results) -> list[Evidence]:
    """Judge the statements of the figures. `elsewhere` has naive overlap's first seed over wide links only."""
    end, judge = task.seconds, Judge(runs, wides)
    fast = runs["none", ALL_WIDE]

    def off(mode: str) -> list[float]:
        """Return the mean distance of a mode's curves from no overlap's over wide links only, seed by seed."""
        seeds = range(len(fast))
        return [statistics.fmean(apart(runs[mode, wide][s], fast[s], end) for wide in wides) for s in seeds]

    def soon(mode: str) -> list[float]:
        """Return a mode's time to come near no overlap's level, over the time of no overlap, seed by seed."""
        ratios = []
        for s in range(len(fast)):
            times = []
            for wide in wides:
                target = _NEARLY * level(runs["none", wide][s], end)
                mine, theirs = reached(runs[mode, wide][s], target), reached(runs["none", wide][s], target)
                times.append((mine if mine is not None else runs[mode, wide][s]["seconds"], theirs))
            ratios.append(statistics.fmean(mine / theirs for mine, theirs in times if theirs))
        return ratios

    def mean(found: Results) -> float:
        return mean_until(found, end)

    def own(found: Results) -> float:
        return mean_until(found, found["seconds"])

    slow, many = wides[0], wides[-1]
    reference = "no overlap over links that are all wide"
    evidence = []
    for mode in ("manager", "autonomous"):
        what = f"{NAMES[mode]}: time to {_NEARLY:.0%} of no overlap's level, over what no overlap takes; below 1"
        evidence.append(below(what, soon(mode), 1.0))
    for mode in ("manager", "autonomous"):
        for other in ("none", "naive"):
            what = f"{NAMES[mode]} is closer than {NAMES[other]} to {reference}: mean distance of the curves, points"
            nearer = [one - two for one, two in zip(off(mode), off(other), strict=True)]
            evidence.append(below(what, nearer))
    for mode in ("manager", "autonomous"):
        what = f"{NAMES[mode]} - no overlap: mean of the curve, points"
        evidence.append(above(f"{what}; equal time", judge.gains(mode, "none", mean)))
        evidence.append(within(f"{what}; equal steps, within {_MARGIN:g}", judge.gains(mode, "none", own), _MARGIN))
    what = "naive overlap - no overlap: mean of the curve, points"
    evidence.append(below(f"{what}; equal time", judge.gains("naive", "none", mean)))
    evidence.append(below(f"{what}; equal steps", judge.gains("naive", "none", own)))
    if many > slow:
        for mode in ("manager", "autonomous"):
            what = f"{NAMES[mode]}: {many} wide links - {slow}, mean of the curve, points"
            evidence.append(above(what, differences(runs[mode, many], runs[mode, slow], mean)))
    gap = apart(elsewhere, runs["naive", slow][0], end)
    what = f"naive overlap: distance of its curves with {ALL_WIDE} wide links and 0, points"
    evidence.append(exact(what, gap, gap < 1e-3))
    return evidence


def curves(task: Task, quick: bool) -> Plan:
    """Train all modes, and no overlap over wide links only, for three figures."""
    task, seeds, wides = (QUICK, 2, (2,)) if quick else (task, SEEDS, WIDES)
    runs = yield from runs_of(task, seeds, wides)
    [elsewhere] = yield [Simulation(task, "naive", ALL_WIDE, 1).run]
    runs["none", ALL_WIDE] = yield [Simulation(task, "none", ALL_WIDE, seed).run for seed in range(1, seeds + 1)]
    moments = np.linspace(0, task.seconds, _PICTURED + 1).tolist()
    lines = []
    for mode, wide in [*((mode, wide) for wide in wides for mode in NAMES), ("none", ALL_WIDE)]:
        means = np.mean([accuracy_at(one, moments) for one in runs[mode, wide]], axis=0)
        lines.append({"mode": mode, "wide": wide, "accuracy": means.tolist()})
    shapes = {"moments": moments, "lines": lines, "wides": list(wides)}
    return Found(curve_evidence(runs, task, wides, elsewhere), shapes)


def draw_curves(shapes: Results, figure: Any) -> None:
    """Draw one panel per figure: the mean curve of each mode, and no overlap's over wide links only."""
    lines = {(one["mode"], one["wide"]): one["accuracy"] for one in shapes["lines"]}
    panels = figure.subplots(1, len(shapes["wides"]), sharey=True, squeeze=False)[0]
    top = max(max(one) for one in lines.values())
    for axes, wide in zip(panels, shapes["wides"], strict=True):
        fast = lines["none", ALL_WIDE]
        axes.plot(shapes["moments"], fast, color="black", lw=0.8, ls="--", label="no overlap, all wide")
        for mode, name in NAMES.items():
            axes.plot(shapes["moments"], lines[mode, wide], color=COLOURS[mode], lw=1, label=name)
        axes.set(xlabel="virtual s", title=f"{wide} wide", ylim=(top - 20, top + 1))
    panels[0].set_ylabel("test accuracy, %")
    panels[-1].legend(frameon=False, fontsize=6)
