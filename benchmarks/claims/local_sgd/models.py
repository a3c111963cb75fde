"""One training of P local models, each on a thread. All claims about local SGD's accuracy and distance use it.

Each local model is trained as if it were alone, on local mini-batches of B images, and models are averaged every I
steps. The learning rate is that of one model times P or its square root, after a gradual warm-up. A seed
determines the initial parameters and the order of the images, and is the same for every P.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

import sordino.torch as hvd
from claims.claim import Run
from claims.local_sgd.problems import Problem, problem_of
from sordino import sim
from sordino.algorithms import AllReduce, LocalSGD
from sordino.report import Results

WARM_UP = 0.1  # share of the steps
_STEP = {"classification": 200, "resolution": 20}  # fixed cost of a local model's step, in images
_IMAGE = {"classification": 1.0, "resolution": 20.0}  # relative cost of an image


@dataclass(frozen=True)
class Local:
    """Settings of one training.

    Attributes:
        problem: "classification" or "resolution".
        data: "digits" or "fashion-mnist".
        images: number of training images.
        held_out: number of other images, for validation.
        epochs: passes over the images.
        batch: B, the mini-batch of each local model.
        interval: I, the steps between averagings.
        models: P, the number of local models; 1 is plain SGD.
        lr: learning rate of one model.
        rule: scaling of the learning rate with P: "linear", "sqrt" or "none".
        seed: seed of the initial parameters and the order of the images.
        decay: whether the learning rate falls as a cosine after the warm-up.
    """

    problem: str
    data: str
    images: int
    held_out: int
    epochs: int
    batch: int
    interval: int
    models: int
    lr: float
    rule: str
    seed: int
    decay: bool = True

    @property
    def steps(self) -> int:
        """Number of steps of each local model."""
        return self.epochs * (self.images // (self.batch * self.models))

    @property
    def run(self) -> Run:
        """The training as a run, with its cost in images."""
        worth = _IMAGE[self.problem] * self.steps * self.models * (self.batch + _STEP[self.problem])
        return Run("claims.local_sgd.models:train", asdict(self), worth)


def train(**settings: Any) -> Results:
    """Carry out a training, one thread per local model.

    Returns:
        test: the mean model's score on the test images; curve: its score on the validation images after each epoch;
        losses: mean loss of each epoch; distances: D before each averaging; collapsed: whether a loss was not finite or
        the last loss was above the first. Values that are not finite are None.
    """
    local = Local(**settings)
    problem = problem_of(local.problem, local.data, local.images, local.held_out)
    found: Results = sim.run(local.models, _work, local, problem, problem.model(local.seed))[0]
    return found


def _work(local: Local, problem: Problem, initial: torch.nn.Module) -> Results:
    """Train one local model."""
    torch.set_num_threads(1)
    model = copy.deepcopy(initial)
    scaled = hvd.scale_learning_rate(local.lr, local.models, local.rule)
    several = local.models > 1
    optimizer = hvd.DistributedOptimizer(
        problem.optimizer(model.parameters(), scaled),
        named_parameters=model.named_parameters(),
        algorithm=LocalSGD(local.interval, log_distance=local.interval) if several else AllReduce(),
    )
    warm_up = int(WARM_UP * local.steps) if local.rule != "none" else 0
    cosine = None
    if local.decay:
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(local.steps - warm_up, 1))
    scheduler = hvd.GradualWarmup(optimizer, warm_up, local.lr / scaled, after=cosine)
    losses, curve = [], []
    together, total, steps = local.batch * local.models, local.images, 0
    for epoch in range(local.epochs):
        order = np.random.Generator(np.random.PCG64((local.seed, epoch))).permutation(total)
        sum_of_losses = 0.0
        for first in range(hvd.rank() * local.batch, total // together * together, together):
            rows = torch.from_numpy(order[first : first + local.batch])
            optimizer.zero_grad()
            loss = problem.loss(model, rows, local.seed * 1_000_000 + epoch * 10_000 + first // local.batch)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            scheduler.step()
            sum_of_losses += loss.item()
            steps += 1
        mean = hvd.allreduce(torch.tensor([sum_of_losses * local.epochs / local.steps]), name="claims.loss")
        losses.append(float(mean[0]))
        curve.append(_mean_score(problem, model, "validation"))
    test = _mean_score(problem, model, "test")
    if hvd.rank() != 0:
        return {}
    distances = [float(distance) for _, distance in optimizer.distances] if several else []
    return {
        "test": test,
        "curve": curve,
        "losses": [_finite(one) for one in losses],
        "distances": [_finite(one) for one in distances],
        "collapsed": has_collapsed(losses),
    }


def _mean_score(problem: Problem, model: torch.nn.Module, part: str) -> float:
    """Return the mean model's score on rank 0 (0.0 if not finite), and 0.0 on other ranks. Collective."""
    parameters = hvd.average_parameters(model)
    if hvd.rank() != 0:
        return 0.0
    mean = copy.deepcopy(model)
    mean.load_state_dict(parameters)
    found = problem.score(mean, part)
    return found if math.isfinite(found) else 0.0


def has_collapsed(losses: Sequence[float]) -> bool:
    """Return whether a training has collapsed, by the mean losses of its epochs."""
    return not all(math.isfinite(one) for one in losses) or losses[-1] > losses[0]


def settled(distances: Sequence[float | None]) -> float | None:
    """Return the mean distance after the warm-up; None if the training diverged."""
    late = [one for one in distances[math.ceil(WARM_UP * len(distances)) :] if one is not None]
    whole = len(late) == len(distances) - math.ceil(WARM_UP * len(distances))
    return sum(late) / len(late) if whole and late else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
