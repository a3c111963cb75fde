"""Engine for algorithms whose workers take their steps together. One step of all workers is one turn of a loop.

  numerics      change the parameters: the real optimizer with data (training.py), arrays without data (vectorized.py)
  StepMessages  returns the messages of the step (traffic.py)
  Timeline      advances the clocks of the workers by these messages (timeline.py)
  record        gets a point of the curve after each further 1 / `job.points` of the run

Numerics and time are separate, because the effect of a step on the parameters does not depend on times. A step is not
begun if its computation would end after `job.seconds` on some worker. A point of the curve has the time of the slowest
worker.

Cost without data, for models of 8 numbers, on one core: 10^5 workers take 0.05 s per step with all-reduce, 0.2 s with
algorithms that mix one segment (such as push-sum), and 0.7 s with four segments (crossover, segmented-gossip). 10^4
workers take a tenth of that, 10^3 a hundredth. Peak memory per worker is 0.4 kB with all-reduce, 0.5 to 0.6 kB with one
segment and 0.8 kB with four (growth of the resident set for 10^5 workers).
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
from sordino.simulate.traffic import StepMessages
from sordino.simulate.training import Trainee, train
from sordino.simulate.vectorized import numerics_of


def run(job: Job, progress: Progress) -> Outcome:
    """Simulate an algorithm whose workers take their steps together.

    Raises:
        UsageError: a setting would have no effect (see `check`), the algorithm does not work with this number of
            workers, or the data are missing.
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
    """Progress of a run: its time, its curve, and whether there is another step."""

    def __init__(
        self, job: Job, progress: Progress, traffic: StepMessages, evaluate: Callable[[], dict[str, float]]
    ) -> None:
        self.steps = 0
        self.record = Record(job.workers, job.spans_until)
        self._timeline = Timeline(job, self.record, traffic.delay)
        self._job, self._progress, self._traffic, self._evaluate = job, progress, traffic, evaluate
        self._done = 0.0  # fraction of the run
        self._evaluated = -1  # number of steps at the last point of the curve
        self._point()

    @property
    def seconds(self) -> float:
        """Virtual time of the slowest worker, in seconds."""
        return float(self._timeline.clock.max())

    def has_next(self) -> bool:
        """Return whether there is another step. After the last step, add the last point to the curve."""
        if self._job.steps is not None:
            further = self.steps < self._job.steps
        else:
            further = float((self._timeline.clock + self._job.compute).max()) <= self._job.horizon
        if not further:
            self._point()
            self._progress(1.0)
        return further

    def stepped(self, sent: Booleans | None) -> None:
        """Note a step. `sent` flags the items that parameter skipping has sent."""
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
    while course.has_next():
        course.stepped(numerics.step(course.steps))
    return Outcome(course.record, course.seconds, problem.final())


def traffic_of(
    job: Job, problem: Problem, tensors: Sequence[tuple[str, int]], shapes: Sequence[Sequence[int]] | None = None
) -> StepMessages:
    """Return the traffic of a job's algorithm on a model with float32 tensors.

    Args:
        job: the job, with its algorithm, number of workers and bytes of a message.
        problem: the problem, which gives the bytes of its parameters.
        tensors: name and number of elements of each tensor.
        shapes: the shape of each tensor, which some codecs need; None: unknown.
    """
    return _messages(job, problem.parameter_bytes, tensors, shapes)


def _messages(
    job: Job,
    parameter_bytes: int,
    tensors: Sequence[tuple[str, int]],
    shapes: Sequence[Sequence[int]] | None = None,
) -> StepMessages:
    scale = job.message_bytes / parameter_bytes
    sizes = [4 * count * scale for _, count in tensors]
    model = Model([name for name, _ in tensors], sizes, scale, job.codec, shapes)
    return StepMessages(job.algorithm, job.workers, model)


def messages_of(job: Job) -> StepMessages:
    """Return the messages that a job would send in training.

    Raises:
        UsageError: the data are missing, or the algorithm does not work with this number of workers.
    """
    if job.data == "none":
        quadratic = Quadratic(job)
        return traffic_of(job, quadratic, quadratic.tensors)
    from sordino.simulate.images import Trainee as OfImages

    named = list(OfImages(job, 0).model.named_parameters())
    tensors = [(name, one.numel()) for name, one in named]
    return _messages(job, 4 * sum(count for _, count in tensors), tensors, [one.shape for _, one in named])


def with_data(job: Job, progress: Progress, problem: Problem, trainees: list[Trainee]) -> Outcome:
    """Train `trainees`, one per worker, and evaluate them by `problem`."""
    models = [trainee.model for trainee in trainees]
    named = list(models[0].named_parameters())
    tensors, shapes = [(name, one.numel()) for name, one in named], [one.shape for _, one in named]

    @torch.no_grad()
    def evaluate() -> dict[str, float]:
        for worker, trained in enumerate(models):
            problem.values(worker).copy_(torch.nn.utils.parameters_to_vector(trained.parameters()))
        return problem.evaluate()

    course = _Course(job, progress, traffic_of(job, problem, tensors, shapes), evaluate)
    begun = False

    def has_next(sent: Booleans | None) -> bool:
        nonlocal begun
        if begun:
            course.stepped(sent)
        begun = True
        return course.has_next()

    train(job, trainees, has_next)
    return Outcome(course.record, course.seconds, problem.final())
