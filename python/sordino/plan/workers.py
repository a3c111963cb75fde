"""Number of local models that is worth having, by the rule of Lee et al., which is tried for a few steps.

The ranks share the local models, so there may be more models than ranks.
Source: Lee et al., "Communication-efficient local SGD with hierarchical parallelism", section III-C and equation 9.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch

import sordino.torch as hvd
from sordino.errors import UsageError
from sordino.runtime.context import current_or_none
from sordino.runtime.tensors import squared_distance
from sordino.timing import Participants

WARM_UP = 0.25  # fraction of the steps
PROPORTION = 0.85  # fraction of P' / P that counts as growth in proportion


@dataclass(frozen=True)
class Task:
    """Training to try.

    Attributes:
        model: function that makes the model, always with the same initial parameters.
        optimizer: function that makes an optimizer for given parameters, with the learning rate for one worker.
        loss: loss of the model on the mini-batch of a worker at a step: `loss(model, worker, step)`.
    """

    model: Callable[[], torch.nn.Module]
    optimizer: Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
    loss: Callable[[torch.nn.Module, int, int], torch.Tensor]


@dataclass(frozen=True)
class Workers:
    """Result of the trials.

    Attributes:
        distances: D by P, the mean over the averagings after the warm-up. It is infinite if training diverged:
            parameters are not finite, or the last loss is above the first.
        curves: D before each averaging, by P.
        chosen: the last P up to which D grew in proportion.
        reason: the reason in words.
    """

    distances: dict[int, float]
    chosen: int
    reason: str
    curves: dict[int, list[float]] = field(default_factory=dict)


def find_workers(
    task: Task,
    workers: Sequence[int] = (2, 4, 8, 16),
    interval: int = 8,
    averagings: int = 12,
    rule: str = "linear",
    proportion: float = PROPORTION,
    budget: float = math.inf,
) -> Workers:
    """Find how many local models P are worth having. Collective, if there are several ranks.

    This is the last P up to which the distance D of the models from their mean grows in proportion to P.

    For each P, P local models take `interval * averagings` steps and are averaged every `interval` steps. The learning
    rate warms up over the first quarter of the steps, from the rate for one worker to the rate for P workers by `rule`.
    Each rank trains P / size() of the models, one after the other. Each model keeps its own buffers (BatchNorm
    statistics).

    Args:
        task: the training.
        workers: values of P to try, increasing, at least 2.
        interval: steps between two averagings.
        averagings: number of averagings.
        rule: "linear", "sqrt" or "none", as in `sordino.torch.scale_learning_rate`.
        proportion: D(P') counts as grown in proportion if D(P') / D(P) is at least this fraction of P' / P. The source
            accepts 0.9 (Table II, P = 8) and rejects 0.82 (Figure 4, P = 8).
        budget: seconds. A P that would take longer is not tried, except the first one.

    Raises:
        UsageError: an argument is out of its range.
    """
    rising = all(one < other for one, other in pairwise(workers))
    if not workers or workers[0] < 2 or not rising:
        raise UsageError(f"find_workers(workers={list(workers)}): must be increasing numbers from 2 on")
    if interval < 1 or averagings < 2:
        raise UsageError(f"find_workers(interval={interval}, averagings={averagings}): must be at least 1 and 2")
    if not 0 < proportion <= 1:
        raise UsageError(f"find_workers(proportion={proportion}): must be above 0 and at most 1")
    curves: dict[int, list[float]] = {}
    distances: dict[int, float] = {}
    ranks = Participants(*((context.rank, context.size) if (context := current_or_none()) is not None else (0, 1)))
    begin = time.perf_counter()
    for number, count in enumerate(workers):
        curves[count], losses = _try(task, count, interval, averagings, rule)
        settled = curves[count][math.ceil(WARM_UP * averagings) :]
        trained = len(curves[count]) == averagings and losses[-1] <= losses[0]
        distances[count] = sum(settled) / len(settled) if trained else math.inf
        spent = float(ranks.maximum(np.array([time.perf_counter() - begin]))[0])
        rounds = [math.ceil(one / ranks.size) for one in workers[: number + 2]]
        ahead = spent / sum(rounds[: number + 1]) * rounds[-1]
        if not math.isfinite(distances[count]) or spent + ahead > budget:
            break
    chosen, reason = choose(distances, proportion)
    return Workers(distances, chosen, reason, curves)


def choose(distances: dict[int, float], proportion: float = PROPORTION) -> tuple[int, str]:
    """Return the last number of workers up to which the distance grew in proportion, and the reason for the limit."""
    tried = sorted(distances)
    if not math.isfinite(distances[tried[0]]):
        return 1, f"training with P={tried[0]} local models diverged"
    for few, many in pairwise(tried):
        if not math.isfinite(distances[many]):
            return few, f"training with P={many} local models diverged"
        growth, wanted = distances[many] / distances[few] if distances[few] > 0 else 0.0, many / few
        if growth < proportion * wanted:
            return few, f"from P={few} to P={many} the distance D grew {growth:.2f} times, not about {wanted:g} times"
    return tried[-1], f"the distance D grew in proportion up to P={tried[-1]}, the largest number tried"


def _try(task: Task, count: int, interval: int, averagings: int, rule: str) -> tuple[list[float], list[float]]:
    """Train `count` local models. Return, for every averaging, D before it and the mean loss since the previous one.

    The lists end early if a value is not finite.
    """
    context = current_or_none()
    rank, size = (context.rank, context.size) if context is not None else (0, 1)
    mine = range(rank, count, size)
    models = [task.model() for _ in mine]
    schedulers = []
    for model in models:
        optimizer = task.optimizer(model.parameters())
        for group in optimizer.param_groups:
            group["lr"] = hvd.scale_learning_rate(float(group["lr"]), count, rule)
        warm_up = math.ceil(WARM_UP * interval * averagings)
        start = 1 / hvd.scale_learning_rate(1.0, count, rule)
        schedulers.append(hvd.GradualWarmup(optimizer, warm_up, start))
    zeros = [torch.zeros_like(parameter) for parameter in task.model().parameters()]
    distances: list[float] = []
    losses: list[float] = []
    for averaging in range(averagings):
        total = 0.0
        for worker, model, scheduler in zip(mine, models, schedulers):
            for step in range(averaging * interval, (averaging + 1) * interval):
                scheduler.optimizer.zero_grad()
                loss = task.loss(model, worker, step)
                loss.backward()  # type: ignore[no-untyped-call]
                scheduler.optimizer.step()
                scheduler.step()
                total += loss.item()
        distance = _average(models, [value.clone() for value in zeros], count, size)
        distance, total = (value / count for value in _sum([distance, total], size))
        if not math.isfinite(distance + total):
            break
        distances.append(distance)
        losses.append(total / interval)
    return distances, losses


@torch.no_grad()
def _average(models: Sequence[torch.nn.Module], means: list[torch.Tensor], count: int, size: int) -> float:
    """Replace this rank's models by the mean of all models. Return the sum of their distances from it."""
    for model in models:
        torch._foreach_add_(means, [p.detach() for p in model.parameters()])
    if size > 1:
        hvd.grouped_allreduce_(means, op=hvd.Sum, name="plan.means")
    torch._foreach_div_(means, count)
    total = 0.0
    for model in models:
        parameters = [p.detach() for p in model.parameters()]
        total += math.sqrt(sum(squared_distance(one, mean) for one, mean in zip(parameters, means)))
        torch._foreach_copy_(parameters, means)
    return total


def _sum(values: list[float], size: int) -> list[float]:
    """Return the sums over all ranks."""
    if size == 1:
        return values
    found: list[float] = hvd.allreduce(torch.tensor(values, dtype=torch.float64), op=hvd.Sum, name="plan.sum").tolist()
    return found
