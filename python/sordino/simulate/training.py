"""Step-by-step training with the real `DistributedOptimizer`.

Every virtual worker is a rank of the simulated transport, on a node of its own. After each step all ranks stop while
one of them evaluates.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Protocol

import torch

import sordino.torch as hvd
from sordino import sim
from sordino.simulate.job import Job
from sordino.simulate.phases import Booleans


class Trainee(Protocol):
    """Model and data of one worker."""

    @property
    def model(self) -> torch.nn.Module:
        """The model. Its initial parameters are the same on all workers."""
        ...

    def backward(self) -> None:
        """Add the gradient of the next batch to `grad` of the parameters."""


def train(job: Job, trainees: list[Trainee], has_next: Callable[[Booleans | None], bool]) -> None:
    """Take steps while `has_next` returns True.

    Args:
        job: the job, with the number of workers, the algorithm, the codec, and SGD's learning rate and momentum.
        trainees: trainees of all workers.
        has_next: called before the first step and after each step, while no worker computes and all parameters are
            complete. Its argument flags the items that parameter skipping has sent (None for other algorithms, and
            before the first step). Returns whether there is another step.
    """
    sent: Booleans | None = None
    further = has_next(None)

    def all_there() -> None:
        nonlocal further
        further = has_next(sent)

    barrier = threading.Barrier(job.workers, all_there)

    def rank() -> None:
        nonlocal sent
        trainee = trainees[hvd.rank()]
        optimizer = _wrap(job, trainee)
        for _ in itertools.takewhile(lambda _: further, itertools.count()):
            optimizer.zero_grad()
            trainee.backward()
            optimizer.step()
            optimizer._strategy.complete()  # because `has_next` reads the parameters
            if job.workers > 1 and hvd.rank() == 0:
                sent = optimizer._strategy.sent
            barrier.wait()

    def rank_that_tells() -> None:
        try:
            rank()
        except threading.BrokenBarrierError:
            pass  # the rank that has failed raises the cause
        except BaseException:
            barrier.abort()
            raise

    if further:
        try:
            sim.run(job.workers, rank_that_tells, ranks_per_node=1)
        finally:
            barrier.abort()  # an interrupt reaches this thread only


def _wrap(job: Job, trainee: Trainee) -> hvd.DistributedOptimizer:
    optimizer = torch.optim.SGD(trainee.model.parameters(), lr=job.lr, momentum=job.momentum)
    named = trainee.model.named_parameters()
    return hvd.DistributedOptimizer(optimizer, named, job.codec or hvd.Compression.none, algorithm=job.algorithm)
