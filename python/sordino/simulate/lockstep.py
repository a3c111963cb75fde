"""The algorithms whose workers all take the same steps: how they train, and beside it how long that takes.

What a step does to the parameters does not depend on when things happen, so numerics and time are apart: with data the
numerics are the real optimizer's (training.py), without they are arrays (vectorized.py); the time of a step is that of
its traffic (traffic.py, timeline.py) in both.

A step that does not end its computation within `job.seconds` is not begun. Points of the curve have the time of the
worker that is last.

Without data, for steps of 8 numbers a worker: 10^5 workers take 0.05 s a step with all-reduce, 0.2 s with algorithms
that mix one segment (pushsum, gossipgrad, dpsgd), 0.7 s with four (crossover, segmentedgossip), on one core; 10^4 a
tenth of that, 10^3 a hundredth. At its height the memory is 0.4 kB a worker with all-reduce, 0.5 to 0.6 with one
segment and 0.8 with four (growth of the process's resident set for 10^5 workers).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields

import torch

from sordino.algorithms import (
    DPSGD,
    Algorithm,
    AllReduce,
    Crossover,
    ElasticAveraging,
    GossipGraD,
    Layered,
    LocalSGD,
    ParameterSkipping,
    PushSum,
    SegmentedGossip,
    kind_of,
)
from sordino.algorithms.wide_area import ADPSGD, ScheduledPull
from sordino.errors import UsageError
from sordino.simulate.job import Job, Outcome, Progress
from sordino.simulate.phases import Booleans
from sordino.simulate.problem import Problem
from sordino.simulate.quadratic import Quadratic
from sordino.simulate.record import Record
from sordino.simulate.timeline import Timeline
from sordino.simulate.traffic import Model, Traffic, traffic_of
from sordino.simulate.training import Trainee, train
from sordino.simulate.vectorized import numerics_of

_MIXING = {"interval", "segments"}
_WITHOUT_DATA: dict[type[Algorithm], set[str]] = {
    AllReduce: {"segment_bytes", "double_buffering"},
    Crossover: _MIXING | {"seed", "group_size", "within", "roulette", "segment_bytes"},
    DPSGD: _MIXING,
    ElasticAveraging: {"interval", "moving_rate"},
    GossipGraD: _MIXING | {"seed"},
    Layered: {"group_size", "segment_bytes"},
    LocalSGD: {"interval", "group_size", "exchange", "start", "aggregate", "segment_bytes"},
    ParameterSkipping: {
        *("threshold", "digits", "probe_interval", "exchange", "servers", "granularity", "block_bytes", "seed"),
    },
    PushSum: _MIXING | {"peers", "overlap"},
    SegmentedGossip: _MIXING | {"seed", "replicas"},
}
"""The settings that training without data imitates. `seed` of ParameterSkipping is of a detector that it lacks, which
cannot be chosen then."""

_NEVER = {
    "adaptive": "the interval would follow losses that nobody reports here; give interval=...",
    "buffers": "the models that are simulated have no buffers",
    "communicator": "here all ranks are workers; there are no dedicated communicators",
    "elementwise": "the optimizer of a simulation is SGD, which is known to be element-wise",
    "dedicated_servers": "here all ranks are workers; give servers=... without it",
    "log_distance": "the distance is in the curve, without traffic of its own",
    "scheduler": "the threshold would follow metrics that nobody reports here; give threshold=...",
    "statistics_interval": "the statistics of skipping are not shown here",
}
"""Settings that mean nothing in a simulation, and why."""

_MOST_MESSAGES = 10_000_000  # a step, of all workers


def check(job: Job) -> None:
    """UsageError for settings that would not have their effect in a simulation."""
    algorithm = job.algorithm
    assert not isinstance(algorithm, (ScheduledPull, ADPSGD))
    name = type(algorithm).__name__
    imitated = _WITHOUT_DATA[kind_of(algorithm)]
    for field in fields(algorithm):
        value = getattr(algorithm, field.name)
        if value == field.default:
            continue
        if field.name in _NEVER:
            raise UsageError(f"{name}({field.name}={value!r}) cannot be simulated: {_NEVER[field.name]}")
        if job.data == "none" and field.name not in imitated:
            raise UsageError(
                f"{name}({field.name}={value!r}) cannot be simulated without data; leave it out, or train on "
                "some (--data digits)"
            )
    if isinstance(algorithm, LocalSGD) and algorithm.start == "decay":
        raise UsageError("LocalSGD(start='decay') cannot be simulated: the learning rate stays; give a step")
    if job.kills:
        raise UsageError(
            f"--kill {job.kills[0][0]}@{job.kills[0][1]:g}: when a worker of {name} dies, all others stop; "
            "those of scheduled-pull and adpsgd go on"
        )
    if isinstance(algorithm, ParameterSkipping) and algorithm.exchange == "parameter-server":
        messages = 2 * job.workers * len(algorithm.serving_ranks(job.workers))
        if messages > _MOST_MESSAGES:
            raise UsageError(
                f"ParameterSkipping(servers={algorithm.servers}): {messages} messages a step among {job.workers} "
                f"workers; the simulation takes {_MOST_MESSAGES}. Give fewer servers or workers"
            )


def run(job: Job, progress: Progress) -> Outcome:
    """Simulates an algorithm whose workers take the same steps.

    Raises:
        UsageError: a setting would have no effect (see `check`), the algorithm cannot serve so many workers, or the
            data are missing.
    """
    check(job)
    if job.data == "none":
        return _without_data(job, progress)
    from sordino.simulate.images import Images
    from sordino.simulate.images import Trainee as OfImages

    return with_data(job, progress, Images(job), [OfImages(job, worker) for worker in range(job.workers)])


class _Course:
    """Where a run has come to: its time, its curve, and whether there is another step."""

    def __init__(
        self, job: Job, progress: Progress, traffic: Traffic, evaluate: Callable[[], dict[str, float]]
    ) -> None:
        self.steps = 0
        self.record = Record(job.workers, job.spans_until)
        self._timeline = Timeline(job, self.record, traffic.delay, traffic.behind_loading)
        self._job, self._progress, self._traffic, self._evaluate = job, progress, traffic, evaluate
        self._done = 0.0  # the part of the run that is
        self._evaluated = -1  # the steps after which it was done last
        self._point()

    @property
    def seconds(self) -> float:
        """Virtual time: of the worker that is last."""
        return float(self._timeline.clock.max())

    def goes_on(self) -> bool:
        """Whether there is another step; if not, the curve gets its last point."""
        if self._job.steps is not None:
            further = self.steps < self._job.steps
        else:
            further = float((self._timeline.clock + self._job.compute).max()) <= self._job.horizon
        if not further:
            self._point()
            self._progress(1.0)
        return further

    def stepped(self, sent: Booleans | None) -> None:
        """A step is done; `sent` are the items that parameter skipping has sent."""
        self._timeline.step(self._traffic.phases(self.steps, sent))
        self.steps += 1
        steps, before = self._job.steps, self._done
        self._done = min(self.steps / steps if steps is not None else self.seconds / self._job.horizon, 1.0)
        if math.floor(self._done * self._job.points) > math.floor(before * self._job.points):
            self._point()
        self._progress(self._done)

    def _point(self) -> None:
        if self._evaluated < self.steps:
            self._evaluated = self.steps
            self.record.evaluated(self.seconds, self._evaluate())


def _without_data(job: Job, progress: Progress) -> Outcome:
    problem, algorithm = Quadratic(job), job.algorithm
    assert not isinstance(algorithm, (ScheduledPull, ADPSGD))
    names, elements = (list(column) for column in zip(*problem.tensors))
    model = Model(names, elements, job.message_bytes / problem.parameter_bytes)
    traffic = traffic_of(algorithm, job.workers, model)
    numerics = numerics_of(algorithm, problem, model, traffic.mixing)
    course = _Course(job, progress, traffic, problem.evaluate)
    while course.goes_on():
        course.stepped(numerics.step(course.steps))
    return Outcome(course.record, course.seconds, problem.final())


def with_data(job: Job, progress: Progress, problem: Problem, trainees: list[Trainee]) -> Outcome:
    """Trains `trainees`, one a worker, and evaluates them as `problem` does."""
    algorithm, models = job.algorithm, [trainee.model for trainee in trainees]
    assert not isinstance(algorithm, (ScheduledPull, ADPSGD))
    tensors = list(models[0].named_parameters())
    model = Model(
        [name for name, _ in tensors],
        [parameter.numel() for _, parameter in tensors],
        job.message_bytes / problem.parameter_bytes,
    )

    @torch.no_grad()
    def evaluate() -> dict[str, float]:
        for worker, trained in enumerate(models):
            problem.values(worker).copy_(torch.nn.utils.parameters_to_vector(trained.parameters()))
        return problem.evaluate()

    course = _Course(job, progress, traffic_of(algorithm, job.workers, model), evaluate)
    begun = False

    def goes_on(sent: Booleans | None) -> bool:
        nonlocal begun
        if begun:
            course.stepped(sent)
        begun = True
        return course.goes_on()

    train(job, trainees, goes_on)
    return Outcome(course.record, course.seconds, problem.final())
