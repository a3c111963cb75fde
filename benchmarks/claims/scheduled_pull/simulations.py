"""One training in virtual time, and what is read from its learning curve."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from claims.claim import Run
from sordino.cli.simulate import add_arguments
from sordino.report import Results
from sordino.simulate import command
from sordino.simulate.choices import plan_of

MODES = {
    "none": ("overlap=none",),
    "naive": ("overlap=naive",),
    "manager": ("overlap=scheduled", "schedule=manager"),
    "autonomous": ("overlap=scheduled", "schedule=autonomous"),
}
NAMES = {
    "none": "no overlap",
    "naive": "naive overlap",
    "manager": "scheduled, manager",
    "autonomous": "scheduled, autonomous",
}
COLOURS = {"none": "#c8553d", "naive": "#e0a458", "manager": "#0b6e4f", "autonomous": "#5fb49c"}
WORKERS = 8
LAST = 0.25  # the part of a run that its level is the mean of
_GRID = 13  # moments in it
_EVALUATION = 200  # images of a step that an evaluation takes as long as


@dataclass(frozen=True)
class Task:
    """What is trained, and how long a step and a transfer take.

    Attributes:
        data: "digits" or "fashion-mnist".
        images: of its training part, that are trained on.
        channels: of the network's first layer.
        batch: images a step and worker.
        lr: the learning rate, which stays.
        steps: of each worker.
        message_mib: of a model in transfer.
        compute_ms: of a step.
        points: of the curve, in the time that the steps take without waiting.
    """

    data: str
    images: int
    channels: int
    batch: int
    lr: float
    steps: int
    message_mib: float
    compute_ms: float
    points: int = 16

    @property
    def seconds(self) -> float:
        """Virtual time of the steps without waiting: what is meant by equal time."""
        return self.steps * self.compute_ms / 1e3


@dataclass(frozen=True)
class Simulation:
    """One training.

    Attributes:
        task: what is trained.
        mode: a key of `MODES`.
        wide: workers with fast links.
        seed: of the parameters, the images and their order, and the peers.
        sharing: whether pulls from one peer share its link, or do not slow each other down.
    """

    task: Task
    mode: str
    wide: int
    seed: int
    sharing: str = "none"

    @property
    def run(self) -> Run:
        """The training as a run; its cost is in images."""
        task = self.task
        cost = WORKERS * (task.steps * (task.batch + 16) + task.points * _EVALUATION) * task.channels
        return Run("claims.scheduled_pull.simulations:simulate", asdict(self), float(cost))

    @property
    def words(self) -> list[str]:
        """The options of `sordino simulate`."""
        words = ["--algorithm", "scheduled-pull", "--workers", str(WORKERS)]
        words += [word for one in MODES[self.mode] for word in ("--set", one)]
        for name in ("wide", "seed", "sharing"):
            words += [f"--{name}", str(getattr(self, name))]
        for name, value in asdict(self.task).items():
            words += [f"--{name.replace('_', '-')}", str(value)]
        return words


def simulate(task: Results, **settings: Any) -> Results:
    """Train as `sordino simulate` does.

    Returns:
        The final accuracy, the virtual seconds, the curve: [seconds, accuracy, consensus distance] of each point; and
        means over the workers: the share of time in which they waited, and their pulls' age in seconds.
    """
    one = Simulation(Task(**task), **settings)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    [run] = plan_of(parser.parse_args(one.words)).runs
    outcome = command.simulate(run.job, lambda _: None)
    record = outcome.record
    return {
        "accuracy": outcome.final["accuracy"],
        "seconds": outcome.seconds,
        "waiting": float(record.waiting.mean()) / outcome.seconds,
        "age": float(record.ages.sum() / record.pulls.sum()),
        "pulls": float(record.pulls.mean()),
        "curve": [[point["time"], point["accuracy"], point["consensus_distance"]] for point in record.curve],
    }


# ---- what a curve says -----------------------------------------------------------------------------------------------


def accuracy_at(found: Results, moments: Sequence[float]) -> list[float]:
    """Return the accuracy at some moments, in percent, between two points on the line between them."""
    times, accuracies, _ = zip(*found["curve"], strict=True)
    return [100 * float(one) for one in np.interp(moments, times, accuracies)]


def level(found: Results, end: float) -> float:
    """Return the mean accuracy in the last quarter of the time until `end`, in percent."""
    return float(np.mean(accuracy_at(found, np.linspace((1 - LAST) * end, end, _GRID).tolist())))


def best(found: Results, end: float) -> float:
    """Return the best accuracy of a point until `end`, in percent: the source's figure."""
    return float(max(100 * accuracy for time, accuracy, _ in found["curve"] if time <= end * (1 + 1e-9)))


def rise(found: Results, end: float) -> float:
    """Return how much higher the level is in the last quarter than in the one before, in points."""
    before = np.linspace((1 - 2 * LAST) * end, (1 - LAST) * end, _GRID).tolist()
    return level(found, end) - float(np.mean(accuracy_at(found, before)))


def mean_until(found: Results, end: float) -> float:
    """Return the mean accuracy from the beginning to `end`, in percent: the sooner it rises, the higher it is."""
    return float(np.mean(accuracy_at(found, np.linspace(0, end, 8 * _GRID).tolist())))


def reached(found: Results, accuracy: float) -> float | None:
    """Return when a curve first reaches an accuracy, in percent; None if it never does."""
    curve = [(time, 100 * value) for time, value, _ in found["curve"]]
    for (since, low), (until, high) in itertools.pairwise(curve):
        if low < accuracy <= high:
            return float(since + (until - since) * (accuracy - low) / (high - low))
    return None


def apart(found: Results, other: Results, end: float) -> float:
    """Return how far apart two curves are until `end`: the mean distance in points."""
    moments = np.linspace(0, end, 8 * _GRID).tolist()
    pairs = zip(accuracy_at(found, moments), accuracy_at(other, moments), strict=True)
    return float(np.mean([abs(one - two) for one, two in pairs]))


def distance(found: Results, end: float) -> float:
    """Return the mean consensus distance in the last quarter of the time until `end`."""
    times, _, distances = zip(*found["curve"], strict=True)
    return float(np.mean(np.interp(np.linspace((1 - LAST) * end, end, _GRID), times, distances)))
