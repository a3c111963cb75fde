"""Puts prediction beside measurement for every algorithm, and says which one to take."""

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
from sordino.plan.costs import Rates, cost_of
from sordino.plan.links import idle_sgd
from sordino.plan.workers import Workers
from sordino.timing import Participants

_WARM_UP = 3  # steps: gradients that persist move into shared memory
CLOSE = 1.05  # AllReduce, which changes nothing about training, is preferred to what is not faster than that

Shapes = Sequence[tuple[str, Sequence[int]]]


@dataclass(frozen=True)
class Job:
    """What is to be trained.

    Attributes:
        shapes: names and shapes of the parameters, which are float32.
        compute: seconds that a worker computes in a step.
        samples: in an epoch.
        batch: samples that a worker takes in a step.
    """

    shapes: Shapes
    compute: float
    samples: int
    batch: int

    @property
    def bytes(self) -> list[int]:
        """Of each parameter."""
        return [4 * math.prod(shape) for _, shape in self.shapes]


@dataclass
class Prediction:
    """What an algorithm takes, in seconds, and bytes.

    Attributes:
        name: how to write the algorithm.
        communication: a step, on average, with nothing to hide behind.
        exposed: of that, what is not hidden behind backward.
        step: computation and exposed communication.
        epoch: all steps of an epoch.
        sent: that a rank sends to other nodes in a step, on average.
        measured: the communication, where it was run.
    """

    name: str
    algorithm: Algorithm
    communication: float
    exposed: float
    step: float
    epoch: float
    sent: float
    measured: float | None = None

    @property
    def error(self) -> float | None:
        """How far the prediction is from the measurement, as a part of that."""
        return None if self.measured is None else self.communication / self.measured - 1

    @property
    def best_step(self) -> float:
        """Seconds a step, by the measurement where there is one."""
        if self.measured is None or self.communication == 0:
            return self.step
        return self.step + self.exposed * (self.measured / self.communication - 1)


def candidates(nodes: Sequence[int], interval: int) -> list[Algorithm]:
    """Return every algorithm that means something for ranks on these nodes, with all group sizes.

    Args:
        nodes: the node of each rank, numbered from 0.
        interval: of local SGD.
    """
    found: list[Algorithm] = []
    for name in names():
        try:
            found += class_of(name).candidates(nodes, interval)
        except (UsageError, TypeError) as error:  # somebody's that cannot be imported, or has no defaults
            warnings.warn(f"{name} is not compared: {error}", stacklevel=2)
    return [one for one in found if _serves(one, nodes)]


def _serves(algorithm: Algorithm, nodes: Sequence[int]) -> bool:
    try:
        cost_of(algorithm, nodes, ["probe"], [4])
    except UsageError:
        return False
    return True


def predict(job: Job, nodes: Sequence[int], rates: Rates, interval: int) -> list[Prediction]:
    """Return what every candidate takes, the quickest step first.

    Args:
        job: what is to be trained.
        nodes: the node of each rank, numbered from 0.
        rates: what things cost here.
        interval: of local SGD.
    """
    tensors, sizes = [name for name, _ in job.shapes], job.bytes
    steps = math.ceil(job.samples / (job.batch * len(nodes)))
    found = []
    for algorithm in candidates(nodes, interval):
        cost = cost_of(algorithm, nodes, tensors, sizes)
        exposed = cost.exposed(rates, job.compute)
        step = job.compute + exposed
        sent = sum(cost.sent()) / len(nodes)
        communication = cost.communication(rates)
        found.append(Prediction(algorithm.written(), algorithm, communication, exposed, step, steps * step, sent))
    return sorted(found, key=lambda one: one.step)


def trial(predictions: Sequence[Prediction], shapes: Shapes, budget: float, log: Callable[[str], None]) -> None:
    """Run every algorithm for some steps that compute nothing and note how long they took.

    What would take more than its share of the budget, in seconds, is left out. Collective.
    """
    participants = Participants(hvd.rank(), hvd.size())
    share = budget / len(predictions)
    for one in predictions:
        interval = getattr(one.algorithm, "interval", 1)
        if (_WARM_UP + 2 * interval) * one.communication > 2 * share:
            continue
        one.measured = _seconds(one.algorithm, shapes, participants, share)
        log(f"{one.name}: {one.measured * 1e3:.3g} ms of communication a step, predicted {one.communication * 1e3:.3g}")


def _seconds(algorithm: Algorithm, shapes: Shapes, participants: Participants, budget: float) -> float:
    """Return the median seconds of a step, the slowest rank's, over whole intervals."""
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
        optimizer.flush()  # what is late is communication, too
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
    """Return one line: which algorithm, and why.

    Not one whose gradients or parameters come late: that training bears them was not tried.
    """
    allreduce = next(one for one in predictions if one.algorithm == AllReduce())
    timely = [one for one in predictions if not one.algorithm.traits.late]
    bearable = [one for one in timely if workers is None or one.algorithm.models(size) <= workers.chosen]
    best = min([*bearable, allreduce], key=lambda one: one.best_step)
    if allreduce.best_step <= CLOSE * best.best_step:
        rest = "" if best is allreduce else f" ({best.name} would be {allreduce.best_step / best.best_step:.2f} times)"
        return f"{allreduce.name}: nothing that training bears is more than {CLOSE - 1:.0%} faster{rest}."
    gain = f"a step takes {best.best_step * 1e3:.3g} ms instead of AllReduce's {allreduce.best_step * 1e3:.3g} ms"
    if workers is None:
        return f"{best.name}: {gain}. How many local models training bears was not tried."
    models = best.algorithm.models(size)
    return f"{best.name}: {gain}, and its {models} local models are within the {workers.chosen} that training bears."


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
