"""One simulated training in virtual time, and measures of its learning curve."""

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
LAST = 0.25  # last part of a run; its mean accuracy is the level of the run
_GRID = 13  # number of moments in this part
_EVALUATION = 200  # cost of an evaluation, in images of a step


@dataclass(frozen=True)
class Task:
    """Settings of a training, and the times of a step and a transfer.

    Attributes:
        data: "digits" or "fashion-mnist".
        images: number of training images.
        channels: number of channels of the network's first layer.
        batch: images per step and worker.
        lr: the constant learning rate.
        steps: number of steps of each worker.
        message_mib: bytes of a model in transfer, in MiB.
        compute_ms: computation of a step, in ms.
        points: number of points of the curve in the time of the steps without waiting.
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
        """Virtual seconds of the steps without waiting. Comparisons at equal time end at this time."""
        return self.steps * self.compute_ms / 1e3


@dataclass(frozen=True)
class Simulation:
    """One training.

    Attributes:
        task: settings of the training.
        mode: a key of `MODES`.
        wide: number of workers with wide links.
        seed: seed of the parameters, the images and their order, and the peers.
        sharing: "fair" if pulls from one peer share its link, "none" if they do not slow each other down.
    """

    task: Task
    mode: str
    wide: int
    seed: int
    sharing: str = "none"

    @property
    def run(self) -> Run:
        """The training as a run, with its cost in images times channels."""
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
        The final accuracy; the virtual seconds; the curve as [seconds, accuracy, consensus distance] of each point; and
        means over the workers: the share of time that they waited, and the age of pulled models in seconds.
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


# ---- measures of a curve ---------------------------------------------------------------------------------------------


def accuracy_at(found: Results, moments: Sequence[float]) -> list[float]:
    """Return the accuracy at some moments in percent, by linear interpolation between the points."""
    times, accuracies, _ = zip(*found["curve"], strict=True)
    return [100 * float(one) for one in np.interp(moments, times, accuracies)]


def level(found: Results, end: float) -> float:
    """Return the mean accuracy in the last quarter of the time until `end`, in percent."""
    return float(np.mean(accuracy_at(found, np.linspace((1 - LAST) * end, end, _GRID).tolist())))


def best(found: Results, end: float) -> float:
    """Return the best accuracy of the points until `end`, in percent. This is the source's measure."""
    return float(max(100 * accuracy for time, accuracy, _ in found["curve"] if time <= end * (1 + 1e-9)))


def rise(found: Results, end: float) -> float:
    """Return the mean accuracy in the last quarter until `end`, less that in the third, in points."""
    before = np.linspace((1 - 2 * LAST) * end, (1 - LAST) * end, _GRID).tolist()
    return level(found, end) - float(np.mean(accuracy_at(found, before)))


def mean_until(found: Results, end: float) -> float:
    """Return the mean accuracy from the beginning to `end`, in percent. It is high if the curve rises early."""
    return float(np.mean(accuracy_at(found, np.linspace(0, end, 8 * _GRID).tolist())))


def reached(found: Results, accuracy: float) -> float | None:
    """Return the virtual seconds until a curve first rises to an accuracy in percent; None if it never does."""
    curve = [(time, 100 * value) for time, value, _ in found["curve"]]
    for (since, low), (until, high) in itertools.pairwise(curve):
        if low < accuracy <= high:
            return float(since + (until - since) * (accuracy - low) / (high - low))
    return None


def apart(found: Results, other: Results, end: float) -> float:
    """Return the mean distance of two curves until `end`, in points."""
    moments = np.linspace(0, end, 8 * _GRID).tolist()
    pairs = zip(accuracy_at(found, moments), accuracy_at(other, moments), strict=True)
    return float(np.mean([abs(one - two) for one, two in pairs]))


def distance(found: Results, end: float) -> float:
    """Return the mean consensus distance in the last quarter of the time until `end`."""
    times, _, distances = zip(*found["curve"], strict=True)
    return float(np.mean(np.interp(np.linspace((1 - LAST) * end, end, _GRID), times, distances)))
