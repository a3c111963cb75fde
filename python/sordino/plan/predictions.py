"""Predicted and measured times of every algorithm, and the recommendation.

If an algorithm was run, its step time is from the measurement. Otherwise it is from the prediction.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

import sordino.torch as hvd
from sordino.algorithms import Algorithm, AllReduce, class_of, names
from sordino.errors import UsageError
from sordino.plan import evidence
from sordino.plan.costs import Cost, Rates, cost_of
from sordino.plan.links import idle_sgd
from sordino.plan.workers import Workers
from sordino.report.tables import format_seconds
from sordino.timing import Participants

_WARM_UP = 3  # steps, in which persistent gradients move into shared memory
CLOSE = 1.05  # factor by which another algorithm must be faster than AllReduce, which does not change training

Shapes = Sequence[tuple[str, Sequence[int]]]


@dataclass(frozen=True)
class Job:
    """Training to plan.

    Attributes:
        shapes: names and shapes of the parameters, which are float32.
        compute: seconds of computation of a worker in a step.
        samples: samples of an epoch.
        batch: samples of a worker in a step.
    """

    shapes: Shapes
    compute: float
    samples: int
    batch: int

    @property
    def bytes(self) -> list[int]:
        """Bytes of each parameter."""
        return [4 * math.prod(shape) for _, shape in self.shapes]


@dataclass
class Prediction:
    """Times, in seconds, and bytes of an algorithm.

    Attributes:
        algorithm: the algorithm.
        cost: work of its steps, apart from computation.
        rates: costs on this machine.
        compute: seconds of computation of a worker in a step.
        steps: steps of an epoch.
        measured: measured seconds of communication per step; None: not run.
    """

    algorithm: Algorithm
    cost: Cost
    rates: Rates
    compute: float
    steps: int
    measured: float | None = None

    @property
    def name(self) -> str:
        """The algorithm as Python source."""
        return self.algorithm.written()

    @property
    def communication(self) -> float:
        """Predicted mean seconds of communication per step, if nothing hides it."""
        return self.cost.communication(self.rates)

    @property
    def sent(self) -> float:
        """Mean bytes that a rank sends to other nodes in a step."""
        sent = self.cost.sent()
        return sum(sent) / len(sent)

    @property
    def error(self) -> float | None:
        """Relative error of the predicted communication, or None if it was not measured."""
        return None if self.measured is None else self.communication / self.measured - 1

    @property
    def exposed(self) -> float:
        """Seconds of communication per step that are not hidden, scaled by the measurement if there is one."""
        slower = 1.0 if self.measured is None or self.communication == 0 else self.measured / self.communication
        return self.cost.exposed(self.rates, self.compute, slower=slower)

    @property
    def step(self) -> float:
        """Seconds of computation and exposed communication in a step."""
        return self.compute + self.exposed

    @property
    def epoch(self) -> float:
        """Seconds of all steps of an epoch."""
        return self.steps * self.step


def candidates(nodes: Sequence[int], interval: int) -> list[Algorithm]:
    """Return all algorithms that make sense for ranks on these nodes, with all group sizes.

    Args:
        nodes: the node of each rank, numbered from 0.
        interval: averaging interval of local SGD, in steps.
    """
    found: list[Algorithm] = []
    for name in names():
        try:
            found += class_of(name).candidates(nodes, interval)
        except (UsageError, TypeError) as error:  # a user's algorithm that cannot be imported or has no defaults
            warnings.warn(f"{name} is not compared: {error}", stacklevel=2)
    return [one for one in found if _serves(one, nodes)]


def _serves(algorithm: Algorithm, nodes: Sequence[int]) -> bool:
    try:
        cost_of(algorithm, nodes, ["probe"], [4])
    except UsageError:
        return False
    return True


def predict(job: Job, nodes: Sequence[int], rates: Rates, interval: int) -> list[Prediction]:
    """Return a prediction for every candidate, ordered by the time of a step.

    Args:
        job: the training.
        nodes: the node of each rank, numbered from 0.
        rates: costs on this machine.
        interval: averaging interval of local SGD, in steps.
    """
    tensors, sizes = [name for name, _ in job.shapes], job.bytes
    steps = math.ceil(job.samples / (job.batch * len(nodes)))
    found = [
        Prediction(algorithm, cost_of(algorithm, nodes, tensors, sizes), rates, job.compute, steps)
        for algorithm in candidates(nodes, interval)
    ]
    return sorted(found, key=lambda one: one.step)


def trial(predictions: list[Prediction], shapes: Shapes, budget: float, log: Callable[[str], None]) -> None:
    """Run every algorithm for some steps without computation, and note their times. Collective.

    An algorithm that would take more than its share of the budget, in seconds, is left out. Afterwards the predictions
    are ordered by the time of a step.
    """
    participants = Participants(hvd.rank(), hvd.size())
    share = budget / len(predictions)
    for one in predictions:
        interval = getattr(one.algorithm, "interval", 1)
        if (_WARM_UP + 2 * interval) * one.communication > 2 * share:
            continue
        one.measured = _seconds(one.algorithm, shapes, participants, share)
        found, predicted = format_seconds(one.measured), format_seconds(one.communication)
        log(f"{one.name}: {found} of communication per step, predicted {predicted}")
    predictions.sort(key=lambda one: one.step)


def _seconds(algorithm: Algorithm, shapes: Shapes, participants: Participants, budget: float) -> float:
    """Return the median seconds of a step on the slowest rank, over whole intervals."""
    named = [(name, torch.nn.Parameter(torch.zeros(tuple(shape)))) for name, shape in shapes]
    for _, parameter in named:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = hvd.DistributedOptimizer(idle_sgd([parameter for _, parameter in named]), named, algorithm=algorithm)
    interval = getattr(algorithm, "interval", 1)

    def run() -> float:
        participants.barrier()
        begin = time.perf_counter()
        for _ in range(interval):
            optimizer.step()
        optimizer.flush()  # exchanges in flight are communication, too
        return (time.perf_counter() - begin) / interval

    for _ in range(math.ceil(_WARM_UP / interval)):
        run()
    begin = time.perf_counter()
    seconds = [run()]
    # All ranks must stop after the same round.
    while len(seconds) < 50 and float(participants.maximum(np.array([time.perf_counter() - begin]))[0]) < budget / 2:
        seconds.append(run())
    return float(np.median(participants.maximum(np.array(seconds))))


def recommend(predictions: Sequence[Prediction], size: int, workers: Workers | None) -> str:
    """Return the recommended algorithm and the reason, in one line.

    Algorithms whose gradients or parameters come late are excluded, because their effect on training is not tried. Of
    the algorithms that are about as fast as the fastest one, those without a codec are preferred.
    """
    allreduce = next(one for one in predictions if one.algorithm == AllReduce())
    timely = [one for one in predictions if not one.algorithm.traits.late]
    allowed = [one for one in timely if workers is None or one.algorithm.models(size) <= workers.chosen]
    least = min(one.step for one in [*allowed, allreduce])
    close = [one for one in [*allowed, allreduce] if one.step <= CLOSE * least]
    whole = [one for one in close if getattr(one.algorithm, "compression", None) is None]
    best = min(whole or close, key=lambda one: one.step)
    times = allreduce.step / best.step
    if times <= CLOSE:
        rest = f" ({best.name} would be {times:.2f} times as fast)" if times > 1.005 else ""
        return f"{allreduce.name}: no algorithm that qualifies is more than {CLOSE - 1:.0%} faster{rest}."
    gain = f"a step takes {format_seconds(best.step)} instead of AllReduce's {format_seconds(allreduce.step)}"
    models = best.algorithm.models(size)
    if models == 1:
        return f"{best.name}: {gain}, and all workers have the same parameters."
    known = evidence.sentence(best.algorithm)
    if workers is None:
        return f"{best.name}: {gain}. The accuracy with its {models} local models was not tested here. {known}"
    return (
        f"{best.name}: {gain}, and its {models} local models are within the {workers.chosen} that the rule allows. "
        f"{known} Compare its accuracy with AllReduce's before you rely on it."
    )


def as_rows(predictions: Sequence[Prediction]) -> list[Mapping[str, object]]:
    """Return the predictions for the JSON file."""
    return [
        {
            "name": one.name,
            "communication": one.communication,
            "exposed": one.exposed,
            "step": one.step,
            "epoch": one.epoch,
            "sent": one.sent,
            "measured": one.measured,
            "error": one.error,
        }
        for one in predictions
    ]
