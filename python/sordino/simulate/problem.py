"""What virtual workers train: real images, or a quadratic that needs no data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from sordino.simulate.job import Job


class Problem(Protocol):
    """What is trained, and every worker's parameters. Everything random in it comes from the job's seed.

    Attributes:
        size: how many parameters a model has.
    """

    size: int

    @property
    def parameter_bytes(self) -> int:
        """Of one model."""
        ...

    def gradient(self, workers: list[int]) -> None:
        """Compute the gradient of each of these workers' next batch at its parameters as they are now, and keep it."""

    def step(self, workers: list[int]) -> None:
        """Move the parameters of each of these workers by the gradient that was computed last."""

    def leave(self, worker: int) -> None:
        """Take in that the worker is dead: what is evaluated is that of the others."""

    def values(self, worker: int) -> Tensor:
        """Return the worker's parameters, float32 [size]: the memory itself, to read and to write."""
        ...

    def evaluate(self) -> dict[str, float]:
        """Return what a point of the learning curve says.

        It is "consensus_distance", the mean over workers of the distance from the mean of them all, as
        `sordino.torch.consensus_distance`; with data "accuracy", the mean over workers on a fixed part of the test
        images; without, "distance", the mean over workers of the distance from the optimum.
        """
        ...

    def final(self) -> dict[str, float]:
        """Return what is found after the last step, as `evaluate`, but with all test images; and "best_accuracy".

        That is the accuracy of the parameters that were best in `evaluate`, or of the last ones if they are better
        ("best_distance" without data).
        """
        ...


def problem_of(job: Job) -> Problem:
    """Return the problem that the job names.

    Raises:
        UsageError, NotBuilt: its data are missing.
    """
    if job.data == "none":
        from sordino.simulate.quadratic import Quadratic

        return Quadratic(job)
    from sordino.simulate.images import Images

    return Images(job)
