"""Helpers for tests of the simulator's lock-step engine: the algorithms, jobs, and training with the real optimizer."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import torch
from algorithm_table import CONSERVING, SYNCHRONOUS

import sordino.torch as hvd
from sordino.algorithms import (
    DPSGD,
    Algorithm,
    AllReduce,
    CaPS,
    Crossover,
    DiLoCo,
    ElasticAveraging,
    Layered,
    LocalSGD,
    NoLoCo,
    PushSum,
    SegmentedGossip,
)
from sordino.simulate import lockstep
from sordino.simulate.job import Job, Outcome
from sordino.simulate.links import Links
from sordino.simulate.quadratic import Quadratic, Trainee
from sordino.simulate.training import train

WORKERS = 4
MIXES: dict[str, Algorithm] = {
    **CONSERVING,
    "crossover-seed": Crossover(seed=3),
    "crossover-model": Crossover(segments="model", interval=2),
    "crossover-bytes": Crossover(segments=20),
    "crossover-patterns": Crossover(segments=("layers.1.*", "layers.[23].*")),
    "crossover-roulette": Crossover(roulette=[[0, 1, 1, 1], [1, 0, 1, 1], [1, 1, 0, 1], [1, 1, 1, 0]]),
    "dpsgd-blocks": DPSGD(segments="blocks"),
    "push-sum-two": PushSum(peers={0: 2, 3: 1}, segments="blocks"),
}
"""Algorithms that keep the sum over workers."""
CHOICES: dict[str, Algorithm] = MIXES | {
    **{name: one for name, one in SYNCHRONOUS.items() if one.simulation.arrays is not None},
    "allreduce-late": AllReduce(double_buffering=True),
    "allreduce-segments": AllReduce(bucket_bytes=16),
    "layered-groups": Layered(group_size=2),
    "local-sgd": LocalSGD(interval=2),
    "local-sgd-groups": LocalSGD(interval=3, group_size=2, start=2),
    "local-sgd-allreduce": LocalSGD(interval=2, group_size=2, start=1, exchange="allreduce"),
    "local-sgd-gradients": LocalSGD(interval=2, group_size=2, aggregate="gradients"),
    "local-sgd-one": LocalSGD(interval=2, group_size=4),
    "caps-digits": CaPS(digits=0, threshold=50, probe_interval=2),
    "caps-probes": CaPS(threshold=0, probe_interval=2),
    "caps-blocks": CaPS(digits=0, threshold=40, granularity="block", block_bytes=64),
    "caps-servers": CaPS(digits=0, exchange="parameter-server"),
    "caps-server": CaPS(exchange="parameter-server", servers=1),
    "crossover-groups": Crossover(group_size=2, seed=1),
    "crossover-leaders": Crossover(group_size=2, within="leader"),
    "crossover-one": Crossover(group_size=4),
    "segmented-replicas": SegmentedGossip(replicas=2),
    "push-sum-overlap": PushSum(overlap=2),
    "push-sum-overlap-two": PushSum(peers=2, overlap=1, interval=2),
    "elastic-averaging": ElasticAveraging(interval=2),
    "diloco": DiLoCo(interval=2, outer_lr=0.7, outer_momentum=0.9),
    "diloco-overlap": DiLoCo(interval=4, outer_momentum=0.5, fragments=2, overlap=1),
    "diloco-overlap-mix": DiLoCo(interval=3, outer_lr=0.8, overlap=2, mix=0.25, group_size=2),
    "diloco-fragments": DiLoCo(interval=4, outer_momentum=0.5, nesterov=False, fragments=2, group_size=2),
    "noloco": NoLoCo(interval=2),
    "noloco-blocks": NoLoCo(interval=2, gamma=0.3, outer_momentum=0.8, segments="blocks", peers=3, seed=2),
    "noloco-groups": NoLoCo(interval=2, gamma=0.3, group_size=2),
}


def job_of(algorithm: Algorithm, workers: int = WORKERS, **options: Any) -> Job:
    """Return a job without data, on links that take no time."""
    given: dict[str, Any] = {
        "links": Links(np.full(workers, math.inf), 0.0),
        "compute": np.full(workers, 0.01),
        "message_bytes": 32.0,
        "data": "none",
        **options,
    }
    if "seconds" not in given:
        given = {"steps": 6, **given}
    return Job(algorithm, workers, **given)


def silent(part: float) -> None:
    """Progress function that does nothing."""


class OnTorch(Trainee):
    """A worker of the quadratic as a torch module, which notes the transport's byte count at each gradient.

    Args:
        pause: seconds that the worker sleeps in each step.
    """

    def __init__(self, problem: Quadratic, worker: int, pause: float = 0.0) -> None:
        super().__init__(problem, worker)
        self.sent: list[float] = []
        self._pause = pause

    def backward(self) -> None:
        self.sent.append(hvd.stats()["bytes_sent"])
        time.sleep(self._pause)
        super().backward()


def really_trained(
    job: Job, steps: int, late: bool = False
) -> tuple[list[np.ndarray], list[OnTorch], list[np.ndarray | None]]:
    """Train with the real optimizer. Return all workers' parameters after each step, the trainees, and for each step
    which items parameter skipping has sent (None for other algorithms).

    Args:
        job: the job.
        steps: number of steps.
        late: whether worker 1 takes 20 ms longer for a step, more than the others wait in a turn (10 ms).
    """
    problem = Quadratic(job)
    trainees = [OnTorch(problem, worker, 0.02 if late and worker == 1 else 0.0) for worker in range(job.workers)]
    seen: list[np.ndarray] = []
    skipped: list[np.ndarray | None] = []

    def has_next(sent: np.ndarray | None) -> bool:
        vectors = [torch.nn.utils.parameters_to_vector(one.model.parameters()) for one in trainees]
        seen.append(torch.stack(vectors).detach().numpy().copy())
        skipped.append(sent)
        return len(seen) <= steps

    train(job, trainees, has_next)
    return seen[1:], trainees, skipped[1:]


def seconds_of(algorithm: Algorithm, gbps: list[float], latency: float = 0.0, **options: Any) -> Outcome:
    """Simulate a model of 10^6 bytes (8 ms at 1 Gb/s) and steps of 10 ms."""
    job = job_of(algorithm, len(gbps), links=Links(gbps, latency), message_bytes=1e6, **options)
    return lockstep.run(job, silent)
