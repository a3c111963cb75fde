"""With equal links and no transfer time, the simulator's asynchronous workers equal the real ones, step for step: ranks
as threads take their steps in the order in which the simulated steps ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

import sordino.torch as hvd
from sordino import sim
from sordino.algorithms import ADPSGD, ScheduledPull
from sordino.simulate.averaging import Averaging
from sordino.simulate.command import simulate
from sordino.simulate.job import Job
from sordino.simulate.links import Links
from sordino.simulate.pulling import Pulling
from sordino.simulate.quadratic import Quadratic

STEPS = 13  # the last one ends no window, so no pull after it is waited for


def job_of(algorithm: ScheduledPull | ADPSGD, workers: int) -> Job:
    """Return a job whose workers have different speeds, so that no two steps end at once."""
    compute = np.array([0.010 + 0.00137 * worker for worker in range(workers)])
    links = Links([float("inf")] * workers, 0.0)
    return Job(algorithm, workers, links, compute, 32, steps=STEPS, data="none", lr=0.1, spans_until=1e9)


class Turns:
    """Turns of threads that act one at a time, in a given order."""

    def __init__(self, order: list[int]) -> None:
        self._order, self._place = order, 0
        self._changed = threading.Condition()
        self.optimizers: list[hvd.DistributedOptimizer] = []

    def take(self, rank: int, act: Callable[[], None]) -> None:
        with self._changed:
            due = self._changed.wait_for(lambda: self._order[self._place : self._place + 1] == [rank], timeout=30)
            assert due, f"rank {rank} waits for its turn"
        act()
        with self._changed:
            self._place += 1
            self._changed.notify_all()


class Descent(torch.optim.Optimizer):
    """Optimizer that moves a parameter by the gradient that the worker's problem computed last."""

    def __init__(self, parameter: torch.nn.Parameter, problem: Quadratic, worker: int) -> None:
        super().__init__([parameter], {})
        self.parameter, self.problem, self.worker = parameter, problem, worker

    @torch.no_grad()
    def step(self, closure=None):
        self.problem.values(self.worker).copy_(self.parameter)
        self.problem.step([self.worker])
        self.parameter.copy_(self.problem.values(self.worker))

    @torch.no_grad()
    def look(self) -> None:
        """Compute the gradient at the parameter."""
        self.problem.values(self.worker).copy_(self.parameter)
        self.problem.gradient([self.worker])


def is_idle(optimizer: hvd.DistributedOptimizer, algorithm: ScheduledPull | ADPSGD) -> bool:
    """Return whether all actions that take no virtual time have ended."""
    if isinstance(algorithm, ADPSGD):
        averager = optimizer._strategy._averager
        with averager.lock:
            return averager._number is None and averager._pairing._peer is None
    return algorithm.overlap != "naive" or optimizer._strategy._puller._pull.state == "done"


def really(job: Job, turns: Turns) -> torch.Tensor:
    """Return a rank's final parameters."""
    rank, problem = hvd.rank(), Quadratic(job)
    parameter = torch.nn.Parameter(problem.values(rank).clone())
    plain = Descent(parameter, problem, rank)
    optimizer = hvd.DistributedOptimizer(plain, algorithm=job.algorithm)
    turns.optimizers.append(optimizer)

    def arrived() -> None:
        """Wait for actions that take no virtual time, before another rank acts."""
        limit = time.monotonic() + 100
        while not all(is_idle(one, job.algorithm) for one in turns.optimizers):
            assert time.monotonic() < limit
            time.sleep(0.0002)

    optimizer._strategy.begin(plain)  # where the simulated windows begin, too
    hvd.barrier()
    arrived()
    plain.look()
    hvd.barrier()

    def act() -> None:
        optimizer.step()
        arrived()
        plain.look()

    for _ in range(STEPS):
        turns.take(rank, act)
    hvd.barrier()
    optimizer.flush()
    return parameter.detach().clone()


@pytest.mark.parametrize("workers", [2, 3, 5])
@pytest.mark.parametrize(
    "algorithm",
    [ScheduledPull(2, overlap="none"), ScheduledPull(3, overlap="naive"), ADPSGD(2, overlap=0)],
    ids=["none", "naive", "adpsgd"],
)
def test_equal_to_real_ranks(algorithm: ScheduledPull | ADPSGD, workers: int) -> None:
    job = job_of(algorithm, workers)
    world = Averaging(job, lambda part: None) if isinstance(algorithm, ADPSGD) else Pulling(job, lambda part: None)
    world.run()
    spans = sorted((span.end, span.worker) for span in world.record.spans if span.activity == "compute")
    assert len(spans) == STEPS * workers
    found = sim.run(workers, really, job, Turns([worker for _, worker in spans]))
    for worker in range(workers):
        simulated = world.problem.values(worker)
        if isinstance(algorithm, ADPSGD):  # it adds half a difference instead of taking a mean: other roundings
            torch.testing.assert_close(found[worker], simulated, atol=1e-6, rtol=0)
        else:
            assert torch.equal(found[worker], simulated), (worker, found[worker], simulated)


def test_no_worker_waits_for_pulls_without_transfer_time() -> None:
    for schedule in ("manager", "autonomous"):
        job = job_of(ScheduledPull(2, schedule=schedule), 5)
        outcome = simulate(job, lambda part: None)
        assert outcome.record.waiting.sum() == 0
        assert outcome.record.pulls.sum() > 0
