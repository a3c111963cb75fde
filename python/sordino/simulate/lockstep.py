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
from collections.abc import Callable, Sequence

import torch

from sordino.algorithms.traffic import Model
from sordino.simulate.checks import check
from sordino.simulate.job import Job, Outcome, Progress
from sordino.simulate.phases import Booleans
from sordino.simulate.problem import Problem
from sordino.simulate.quadratic import Quadratic
from sordino.simulate.quadratic import Trainee as OfQuadratic
from sordino.simulate.record import Record
from sordino.simulate.timeline import Timeline
from sordino.simulate.traffic import Traffic
from sordino.simulate.training import Trainee, train
from sordino.simulate.vectorized import numerics_of


def run(job: Job, progress: Progress) -> Outcome:
    """Simulate an algorithm whose workers take the same steps.

    Raises:
        UsageError: a setting would have no effect (see `check`), the algorithm cannot serve so many workers, or the
            data are missing.
    """
    check(job)
    if job.data == "none":
        if job.algorithm.simulation.arrays is not None:
            return _without_data(job, progress)
        quadratic = Quadratic(job)
        return with_data(job, progress, quadratic, [OfQuadratic(quadratic, worker) for worker in range(job.workers)])
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
        """Return whether there is another step; if not, the curve gets its last point."""
        if self._job.steps is not None:
            further = self.steps < self._job.steps
        else:
            further = float((self._timeline.clock + self._job.compute).max()) <= self._job.horizon
        if not further:
            self._point()
            self._progress(1.0)
        return further

    def stepped(self, sent: Booleans | None) -> None:
        """Note that a step is done; `sent` are the items that parameter skipping has sent."""
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
    traffic = traffic_of(job, problem, problem.tensors)
    numerics = numerics_of(algorithm, problem, traffic.rows)
    course = _Course(job, progress, traffic, problem.evaluate)
    while course.goes_on():
        course.stepped(numerics.step(course.steps))
    return Outcome(course.record, course.seconds, problem.final())


def traffic_of(job: Job, problem: Problem, tensors: Sequence[tuple[str, int]]) -> Traffic:
    """Return the traffic of a job's algorithm on a model of float32 tensors.

    Args:
        job: whose algorithm it is; says how many workers there are, and the bytes of a message.
        problem: what is trained; says the bytes of its parameters.
        tensors: their names and elements.
    """
    scale = job.message_bytes / problem.parameter_bytes
    model = Model([name for name, _ in tensors], [4 * count * scale for _, count in tensors], scale)
    return Traffic(job.algorithm, job.workers, model)


def with_data(job: Job, progress: Progress, problem: Problem, trainees: list[Trainee]) -> Outcome:
    """Train `trainees`, one a worker, and evaluate them as `problem` does."""
    models = [trainee.model for trainee in trainees]
    tensors = [(name, parameter.numel()) for name, parameter in models[0].named_parameters()]

    @torch.no_grad()
    def evaluate() -> dict[str, float]:
        for worker, trained in enumerate(models):
            problem.values(worker).copy_(torch.nn.utils.parameters_to_vector(trained.parameters()))
        return problem.evaluate()

    course = _Course(job, progress, traffic_of(job, problem, tensors), evaluate)
    begun = False

    def goes_on(sent: Booleans | None) -> bool:
        nonlocal begun
        if begun:
            course.stepped(sent)
        begun = True
        return course.goes_on()

    train(job, trainees, goes_on)
    return Outcome(course.record, course.seconds, problem.final())
