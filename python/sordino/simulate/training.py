"""The real `DistributedOptimizer`, step by step.

Every virtual worker is a rank of the simulated transport, on a node of its own. After each step all ranks stand still
while one of them looks at what there is.
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
    """One worker's model and data."""

    @property
    def model(self) -> torch.nn.Module:
        """It begins like that of every other worker."""
        ...

    def backward(self) -> None:
        """Add the gradient of the next batch to the parameters' `grad`."""


def train(job: Job, trainees: list[Trainee], goes_on: Callable[[Booleans | None], bool]) -> None:
    """Take steps for as long as `goes_on` says so.

    Args:
        job: says the number of workers, the algorithm, and SGD's rate and momentum.
        trainees: of all workers.
        goes_on: called before the first step and after each, while nobody computes; parameters are those of the real
            algorithm then. Takes which items parameter skipping has sent (other algorithms, and before the first step:
            None), and says whether there is another step.
    """
    sent: Booleans | None = None
    further = goes_on(None)

    def all_there() -> None:
        nonlocal further
        further = goes_on(sent)

    barrier = threading.Barrier(job.workers, all_there)

    def rank() -> None:
        nonlocal sent
        trainee = trainees[hvd.rank()]
        optimizer = _wrap(job, trainee)
        for _ in itertools.takewhile(lambda _: further, itertools.count()):
            optimizer.zero_grad()
            trainee.backward()
            optimizer.step()
            optimizer._strategy.complete()  # others look at the parameters
            if job.workers > 1 and hvd.rank() == 0:
                sent = optimizer._strategy.sent
            barrier.wait()

    def rank_that_tells() -> None:
        try:
            rank()
        except threading.BrokenBarrierError:
            pass  # whose rank has failed says why
        except BaseException:
            barrier.abort()
            raise

    if further:
        try:
            sim.run(job.workers, rank_that_tells, ranks_per_node=1)
        finally:
            barrier.abort()  # an interrupt reaches this thread alone


def _wrap(job: Job, trainee: Trainee) -> hvd.DistributedOptimizer:
    optimizer = torch.optim.SGD(trainee.model.parameters(), lr=job.lr, momentum=job.momentum)
    return hvd.DistributedOptimizer(optimizer, trainee.model.named_parameters(), algorithm=job.algorithm)
