"""The trainings that the source's tables and figures show, as they are run here, and how what they find is judged."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from claims.claim import Run
from claims.evidence import Evidence, above, below, exact, within
from claims.local_sgd.models import Local, settled
from sordino.report import Results

_TUNED_BY = 2  # seeds

Trained = dict[tuple[int, int], Results]
"""What trainings found, by P and the seed."""


@dataclass(frozen=True)
class Study:
    """A training by several numbers of local models.

    Attributes:
        task: settings of `Local` that all have; without the learning rate until `tuned` has found it.
        rates: learning rates of one model that are tried, rising.
        counts: P; the first is 1.
        seeds: how many.
        bears: P up to which the source finds nothing lost.
        drops: what the source loses against P = 1, by P.
        margin: what the source calls significant.
        unit: of accuracy.
    """

    task: dict[str, Any]
    rates: Sequence[float]
    counts: Sequence[int]
    seeds: int
    bears: int
    drops: dict[int, float]
    margin: float
    unit: str

    def training(self, models: int, seed: int, **other: Any) -> Local:
        """Return one training."""
        return Local(**{**self.task, **other}, models=models, seed=seed)

    def ask(self, counts: Sequence[int], **other: Any) -> Generator[Sequence[Run], list[Results], Trained]:
        """Ask for all seeds of some P."""
        keys = [(models, seed) for models in counts for seed in range(1, self.seeds + 1)]
        found = yield [self.training(models, seed, **other).run for models, seed in keys]
        return dict(zip(keys, found, strict=True))

    def tuned(self) -> Generator[Sequence[Run], list[Results], tuple[Study, float]]:
        """Ask which rate suits one model best on images held out, and which of those below it all P bear.

        Returns:
            the study with the largest rate, not above the best, at which the most models do not collapse (the smallest
            of all, if they always do); and the best rate.
        """
        seeds = range(1, min(self.seeds, _TUNED_BY) + 1)
        tried = yield [self.training(1, seed, lr=lr).run for lr in self.rates for seed in seeds]
        means = [
            statistics.fmean(one["curve"][-1] for one in tried[k : k + len(seeds)])
            for k in range(0, len(tried), len(seeds))
        ]
        best = max(self.rates, key=lambda lr: means[self.rates.index(lr)])
        borne = best
        for borne in reversed([lr for lr in self.rates if lr <= best]):
            found = yield [self.training(self.counts[-1], seed, lr=borne).run for seed in seeds]
            if not any(one["collapsed"] for one in found):
                break
        return replace(self, task=self.task | {"lr": borne}), best

    def collapses(self, best: float) -> Generator[Sequence[Run], list[Results], list[Evidence]]:
        """Ask for every P at the rate that suits one model best, and tell which collapse, if it is not the study's."""
        if best == self.task["lr"]:
            return []
        few = replace(self, seeds=min(self.seeds, _TUNED_BY))
        trained = yield from few.ask(self.counts, lr=best)
        collapsed = {
            count: sum(trained[count, seed]["collapsed"] for seed in range(1, few.seeds + 1)) for count in self.counts
        }
        told = ", ".join(f"P = {count}: {number} of {few.seeds}" for count, number in collapsed.items() if number)
        what = f"collapses at {best:g}, the rate that suits one model best, of {len(trained)} trainings: some"
        borne = f"{self.task['lr']:g} is the largest rate tried that P = {self.counts[-1]} bears in {few.seeds} seeds"
        note = f"collapsed: {told or 'none'}; {borne}"
        return [exact(what, sum(collapsed.values()), any(collapsed.values()), note=note)]

    def ask_short(self, best: float) -> Generator[Sequence[Run], list[Results], Trained]:
        """Ask for P = 1, at its best rate, by the P as whose local models it takes as many steps, so as much time."""
        epochs = self.task["epochs"]
        keys = [(count, seed) for count in self.counts[1:] for seed in range(1, self.seeds + 1)]
        found = yield [self.training(1, seed, epochs=epochs // count, lr=best).run for count, seed in keys]
        return dict(zip(keys, found, strict=True))


def pairs(
    trained: Trained, plus: int, minus: int, value: Callable[[Results], float | None]
) -> tuple[list[tuple[float, float]], int]:
    """Return a value of two P, seed by seed, and of how many seeds one of the two collapsed."""
    found, collapsed = [], 0
    for seed in sorted({seed for _, seed in trained}):
        one, other = trained[plus, seed], trained[minus, seed]
        first, second = value(one), value(other)
        if one["collapsed"] or other["collapsed"] or first is None or second is None:
            collapsed += 1
        else:
            found.append((first, second))
    return found, collapsed


def borne(study: Study, trained: Trained) -> int:
    """Return the last P whose mean accuracy is within the margin of that of P = 1, as those before it."""
    last = 1
    for count in study.counts[1:]:
        lost, collapsed = pairs(trained, 1, count, _test)
        if collapsed or statistics.fmean(one - other for one, other in lost) > study.margin:
            break
        last = count
    return last


def accuracy(study: Study, trained: Trained) -> list[Evidence]:
    """Judge accuracies against P: what the most models lose, then each P, and the last that loses nothing."""
    found = []
    most = study.counts[-1]
    lost, collapsed = _differences(trained, 1, most, _test)
    source = study.drops.get(most)
    found.append(above(f"P = 1 above P = {most}, {study.unit}", lost, source=source, collapsed=collapsed))
    for count in study.counts[1:]:
        lost, collapsed = _differences(trained, 1, count, _test)
        source = study.drops.get(count)
        if count <= study.bears:
            what = f"P = 1 above P = {count}, {study.unit}: within {study.margin:g}"
            found.append(within(what, lost, study.margin, source, collapsed))
        else:
            what = f"P = 1 above P = {count}, {study.unit}: more than {study.margin:g}"
            found.append(above(what, lost, study.margin, source, collapsed))
    last = borne(study, trained)
    what = f"the largest P within {study.margin:g} {study.unit} of P = 1"
    return [*found, exact(what, last, last == study.bears, study.bears)]


def learning(study: Study, trained: Trained, short: Trained) -> list[Evidence]:
    """Judge learning curves: the loss at the end at equal epochs, and accuracy at equal steps.

    Args:
        study: which.
        trained: at equal epochs.
        short: P = 1, by the P as whose local models it took as many steps, so as much (virtual) time.
    """
    found = []
    beyond = [count for count in study.counts if count > study.bears] or [study.counts[-1]]
    for count in reversed(beyond):
        values, collapsed = _differences(trained, count, 1, lambda one: one["losses"][-1])
        what = f"equal epochs: training loss of the last one, P = {count} above P = 1"
        found.append(above(what, values, collapsed=collapsed))
    for count in study.counts[1:]:
        both = {(count, seed): trained[count, seed] for seed in range(1, study.seeds + 1)}
        both |= {(1, seed): short[count, seed] for seed in range(1, study.seeds + 1)}
        values, collapsed = _differences(both, count, 1, _test)
        found.append(above(f"equal steps: P = {count} above P = 1, {study.unit}", values, collapsed=collapsed))
    return found


PROPORTION = 0.85  # of a doubling: the source accepts 0.9 (Figure 8, P = 8) and rejects 0.82 (Figure 4, P = 8)


def distances(study: Study, trained: Trained, source: dict[int, float]) -> list[Evidence]:
    """Judge how D grows with every doubling of P; `source` says what part of a doubling it does, by the larger P."""
    found = []
    for few, many in zip(study.counts[1:], study.counts[2:]):
        both, collapsed = pairs(trained, many, few, lambda one: settled(one["distances"]))
        growth = [larger / smaller / 2 for larger, smaller in both]
        what = f"D at P = {many} over D at P = {few}, over 2"
        if many <= study.bears:
            one = above(f"{what}: at least {PROPORTION:g}", growth, PROPORTION, None, collapsed)
        else:
            one = below(f"{what}: less than {PROPORTION:g}", growth, PROPORTION, None, collapsed)
        found.append(replace(one, source=source.get(many)))  # to look at: the limit is what is judged by
    return found[::-1]


def _test(one: Results) -> float:
    return float(one["test"])


def _differences(
    trained: Trained, plus: int, minus: int, value: Callable[[Results], float | None]
) -> tuple[list[float], int]:
    both, collapsed = pairs(trained, plus, minus, value)
    return [first - second for first, second in both], collapsed


def tests(study: Study, trained: Trained) -> dict[str, list[float]]:
    """Return accuracies by P, seed by seed, without those of trainings that collapsed."""
    rows = {count: [trained[count, seed] for seed in range(1, study.seeds + 1)] for count in study.counts}
    return {str(count): [_test(one) for one in ones if not one["collapsed"]] for count, ones in rows.items()}


def mean_curves(study: Study, trained: Trained, key: str) -> dict[str, list[float]]:
    """Return the mean over seeds of a list that trainings found, by P; of those that did not collapse."""
    found = {}
    for count in study.counts:
        rows = [trained[count, seed] for seed in range(1, study.seeds + 1) if (count, seed) in trained]
        sound = [one[key] for one in rows if not one["collapsed"] and one[key]]
        if sound:
            found[str(count)] = [statistics.fmean(values) for values in zip(*sound)]
    return found


def draw_curves(panels: Sequence[tuple[str, str, dict[str, list[float]]]], figure: Any) -> None:
    """Draw curves by P, a panel each: what the axis shows, the label of the other, and the curves."""
    from matplotlib import colormaps

    figure.set_size_inches(4.5 * len(panels) + 1, 3.6)
    for axes, (label, below_it, curves) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels):
        for number, (count, values) in enumerate(curves.items()):
            colour = colormaps["viridis"](number / max(len(curves) - 1, 1))
            places = [(k + 1) / len(values) for k in range(len(values))]
            axes.plot(places, values, color=colour, label=f"P = {count}")
        axes.set_xlabel(below_it)
        axes.set_ylabel(label)
    figure.axes[0].legend(frameon=False, fontsize=7)


def draw_tests(ours: dict[str, list[float]], source: dict[str, float], label: str, figure: Any) -> None:
    """Draw accuracies against P with their standard errors, and the source's in a panel beside."""
    figure.set_size_inches(9, 3.6)
    left, right = figure.subplots(1, 2)
    sound = {int(count): values for count, values in ours.items() if values}
    means = [statistics.fmean(values) for values in sound.values()]
    errors = [statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0 for values in sound.values()]
    left.errorbar(list(sound), means, errors, marker="o", capsize=3, color="#3d5a80")
    right.plot([int(count) for count in source], list(source.values()), "o-", color="#888888")
    for axes, title in ((left, "here"), (right, "the source")):
        axes.set_xscale("log", base=2)
        axes.set_xticks([int(count) for count in source], list(source))
        axes.set(xlabel="local models, P", ylabel=label, title=title)


CLASSIFICATION = Study(
    task={
        "problem": "classification",
        "data": "fashion-mnist",
        "images": 16384,
        "held_out": 5000,
        "epochs": 32,
        "batch": 128,
        "interval": 8,
        "rule": "linear",
    },
    rates=(0.0125, 0.025, 0.05, 0.1, 0.2, 0.4),
    counts=(1, 2, 4, 8, 16, 32),
    seeds=10,
    bears=4,
    drops={2: 0.30, 4: 0.33, 8: 0.80, 16: 2.63, 32: 6.36},
    margin=0.5,
    unit="points",
)
RESOLUTION = Study(
    task={
        "problem": "resolution",
        "data": "fashion-mnist",
        "images": 2048,
        "held_out": 1000,
        "epochs": 16,
        "batch": 16,
        "interval": 4,
        "rule": "sqrt",
    },
    rates=(0.0005, 0.001, 0.002, 0.004),
    counts=(1, 2, 4, 8, 16),
    seeds=10,
    bears=8,
    drops={2: -0.04, 4: 0.25, 8: 0.46, 16: 3.40},
    margin=0.5,
    unit="dB",
)
_SMALL = {"data": "digits", "held_out": 256}


def classification(quick: bool) -> Study:
    """Return the study of the source's Table I, and of Figures 2 to 4."""
    if not quick:
        return CLASSIFICATION
    task = CLASSIFICATION.task | _SMALL | {"images": 1024, "epochs": 4, "batch": 32}
    return replace(CLASSIFICATION, task=task, rates=(0.05, 0.1), counts=(1, 2, 4), seeds=2, bears=2)


def resolution(quick: bool) -> Study:
    """Return the study of the source's Table II, and of Figures 7 and 8."""
    if not quick:
        return RESOLUTION
    task = RESOLUTION.task | _SMALL | {"images": 512, "epochs": 4}
    return replace(RESOLUTION, task=task, rates=(0.001, 0.002), counts=(1, 2, 4), seeds=2, bears=2)
