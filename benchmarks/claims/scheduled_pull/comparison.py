"""Trainings of all modes by the number of wide links: the data of Tables 2 and 3 and Figures 4 to 9."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Generator, Sequence
from typing import Any

from claims.claim import Found, Plan, Run
from claims.evidence import Evidence, above, below, within
from claims.scheduled_pull.simulations import COLOURS, NAMES, Simulation, Task, best, level, rise
from sordino.report import Results

WIDES = (0, 2, 6)  # of the source's tables
ALL_WIDE = 8
SEEDS = 5
COLLAPSED = 30.0  # percent; trainings that did not collapse have more than 70
_MARGIN = 0.3  # points: accuracies that differ by less count as equal
_PLATEAU = 0.4  # points per quarter of the run: a curve that rises by less is at its plateau

Runs = dict[tuple[str, int], list[Results]]
"""Results by mode and number of wide links, seed by seed."""

QUICK = Task("digits", 512, 4, 16, 0.1, 96, 3.5, 10.0, points=4)
TABLE_2 = Task("fashion-mnist", 2048, 8, 32, 0.1, 3600, 54.0, 80.0, points=48)
TABLE_3 = Task("fashion-mnist", 4096, 4, 16, 0.05, 5760, 3.5, 10.0, points=48)


def runs_of(task: Task, seeds: int, wides: Sequence[int]) -> Generator[Sequence[Run], list[Results], Runs]:
    """Ask for all modes with each number of wide links, seed by seed.

    Naive overlap is asked for once: its pulls begin with the window and end before it over any links, so its results
    are always the same.
    """
    keys = [("naive", 0), *((mode, wide) for wide in wides for mode in ("none", "manager", "autonomous"))]
    found = yield [Simulation(task, *key, seed).run for key in keys for seed in range(1, seeds + 1)]
    runs = {key: found[k * seeds : (k + 1) * seeds] for k, key in enumerate(keys)}
    return runs | {("naive", wide): runs["naive", 0] for wide in wides}


Measure = Callable[[Results], float]


def best_in(task: Task) -> Measure:
    """Return a function that gives the source's measure, the best accuracy in equal time."""
    return lambda found: best(found, task.seconds)


def level_in(task: Task) -> Measure:
    """Return a function that gives the level at equal time."""
    return lambda found: level(found, task.seconds)


def level_after_all(found: Results) -> float:
    """Return the level in the last quarter of a run, which is the level at equal steps."""
    return level(found, found["seconds"])


def differences(plus: Sequence[Results], minus: Sequence[Results], measure: Measure) -> list[float]:
    """Return the differences seed by seed, without seeds in which a training collapsed."""
    pairs = zip(plus, minus, strict=True)
    return [measure(one) - measure(other) for one, other in pairs if not (collapsed(one) or collapsed(other))]


def collapsed(found: Results) -> bool:
    """Return whether a training has collapsed."""
    return bool(100 * found["accuracy"] < COLLAPSED)


class Judge:
    """Differences and values of runs, by mode.

    Args:
        runs: results of the trainings.
        wides: numbers of wide links over which a mean is taken, seed by seed.
    """

    def __init__(self, runs: Runs, wides: Sequence[int]) -> None:
        self._runs, self._wides = runs, wides

    def gains(self, plus: str, minus: str, measure: Measure, wides: Sequence[int] | None = None) -> list[float]:
        """Return the differences of two modes, seed by seed, as means over the numbers of wide links."""
        wides = wides or self._wides
        seeds = range(len(self._runs[plus, wides[0]]))
        sound = [s for s in seeds if not any(collapsed(self._runs[m, w][s]) for m in (plus, minus) for w in wides)]
        return [
            statistics.fmean(measure(self._runs[plus, w][s]) - measure(self._runs[minus, w][s]) for w in wides)
            for s in sound
        ]

    @property
    def collapses(self) -> int:
        """Number of collapsed trainings."""
        keys = [key for key in self._runs if key[1] in self._wides and key != ("naive", key[1])]
        return sum(collapsed(one) for key in [*keys, ("naive", self._wides[0])] for one in self._runs[key])

    def values(self, mode: str, measure: Measure) -> list[float]:
        """Return the values of a mode, seed by seed, as means over the numbers of wide links."""
        seeds = range(len(self._runs[mode, self._wides[0]]))
        return [statistics.fmean(measure(self._runs[mode, wide][s]) for wide in self._wides) for s in seeds]


def table_evidence(runs: Runs, task: Task, source: dict[int, dict[str, float]], wides: Sequence[int]) -> list[Evidence]:
    """Judge the statements of a table. `source` has the source's accuracies in percent, by wide links and mode."""
    judge = Judge(runs, wides)
    over = f"mean over {', '.join(map(str, wides[:-1]))} and {wides[-1]} wide links" if len(wides) > 1 else "one row"

    def claimed(mode: str, some: Sequence[int]) -> float:
        return statistics.fmean(source[wide][mode] - source[wide]["none"] for wide in some)

    evidence = []
    for mode in ("manager", "autonomous"):
        what = f"{NAMES[mode]} - no overlap, best accuracy in equal time, points; {over}"
        gains = judge.gains(mode, "none", best_in(task))
        evidence.append(above(what, gains, 0.0, claimed(mode, wides), judge.collapses))
    for wide in wides:
        for mode in ("manager", "autonomous"):
            what = f"{wide} wide: {NAMES[mode]} - no overlap, best accuracy in equal time, points"
            evidence.append(above(what, judge.gains(mode, "none", best_in(task), [wide]), 0.0, claimed(mode, [wide])))
    for mode in ("manager", "autonomous"):
        what = f"{NAMES[mode]} - no overlap, level at equal time, points"
        evidence.append(above(what, judge.gains(mode, "none", level_in(task))))
        what = f"{NAMES[mode]} - no overlap, level at equal steps, points, within {_MARGIN:g}"
        evidence.append(within(what, judge.gains(mode, "none", level_after_all), _MARGIN))
    what = f"manager - autonomous, best accuracy in equal time, points, within {_MARGIN:g}"
    gap = statistics.fmean(source[wide]["manager"] - source[wide]["autonomous"] for wide in wides)
    evidence.append(within(what, judge.gains("manager", "autonomous", best_in(task)), _MARGIN, gap))
    for measure, at in ((level_in(task), "time"), (level_after_all, "steps")):
        what = f"naive overlap - no overlap, level at equal {at}, points"
        evidence.append(below(what, judge.gains("naive", "none", measure)))
    for mode in ("none", "manager", "naive"):
        what = f"{NAMES[mode]}: rise from the third to the last quarter of equal time, points, within {_PLATEAU:g}"
        evidence.append(within(what, judge.values(mode, lambda found: rise(found, task.seconds)), _PLATEAU))
    return evidence


def table(task: Task, source: dict[int, dict[str, float]], quick: bool) -> Plan:
    """Train all modes for a table of the source. `source` has its accuracies in percent, by wide links and mode."""
    task, seeds, wides = (QUICK, 2, (2,)) if quick else (task, SEEDS, WIDES)
    runs = yield from runs_of(task, seeds, wides)
    measure = best_in(task)
    bars = {mode: [[measure(one) for one in runs[mode, wide]] for wide in wides] for mode in NAMES}
    claimed = {mode: [source[wide].get(mode) for wide in wides] for mode in NAMES}
    return Found(table_evidence(runs, task, source, wides), {"wides": list(wides), "best": bars, "source": claimed})


def draw_table(shapes: Results, figure: Any) -> None:
    """Draw our best accuracies in equal time, with standard errors, and the source's in a second panel."""
    ours, theirs = figure.subplots(1, 2)
    for k, mode in enumerate(NAMES):
        places = [place + (k - 1.5) * 0.2 for place in range(len(shapes["wides"]))]
        means = [statistics.fmean(one) for one in shapes["best"][mode]]
        errors = [statistics.stdev(one) / len(one) ** 0.5 for one in shapes["best"][mode]]
        ours.errorbar(places, means, errors, fmt="o", capsize=3, color=COLOURS[mode], label=NAMES[mode])
        if None not in shapes["source"][mode]:
            theirs.plot(places, shapes["source"][mode], "o", color=COLOURS[mode])
    for axes, title in ((ours, "here"), (theirs, "the source")):
        axes.set_xticks(range(len(shapes["wides"])), [f"{wide} wide" for wide in shapes["wides"]])
        axes.set_title(title)
    ours.set_ylabel("best accuracy in equal time, %")
    ours.legend(frameon=False, fontsize=7)
