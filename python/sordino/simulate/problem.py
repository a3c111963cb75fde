"""Interface of the problems that virtual workers train: real images, or a quadratic that needs no data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from sordino.simulate.job import Job


class Problem(Protocol):
    """Problem with the parameters of every worker. All random numbers in it come from the job's seed.

    Attributes:
        size: number of parameters of a model.
    """

    size: int

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the parameters of one model."""
        ...

    def gradient(self, workers: list[int]) -> None:
        """Compute and keep the gradient of the next batch of each of these workers, at its current parameters."""

    def step(self, workers: list[int]) -> None:
        """Change the parameters of each of these workers by the gradient that was computed last."""

    def leave(self, worker: int) -> None:
        """Exclude a dead worker from evaluations."""

    def values(self, worker: int) -> Tensor:
        """Return the worker's parameters, float32 [size]. This is the memory itself, to read and to write."""
        ...

    def evaluate(self) -> dict[str, float]:
        """Return the values of a point of the learning curve.

        "consensus_distance" is the mean over workers of the distance from their mean, as
        `sordino.torch.consensus_distance`. With data, "accuracy" is the mean over workers on a fixed part of the test
        images. Without data, "distance" is the mean over workers of the distance from the optimum.
        """
        ...

    def final(self) -> dict[str, float]:
        """Return the values after the last step, as `evaluate` but with all test images, and "best_accuracy".

        This is the accuracy of the parameters that were best in `evaluate`, or of the last parameters if they are
        better. Without data, "best_distance" takes its place.
        """
        ...


def problem_of(job: Job) -> Problem:
    """Return the problem of a job.

    Raises:
        UsageError, NotBuilt: the data are missing.
    """
    if job.data == "none":
        from sordino.simulate.quadratic import Quadratic

        return Quadratic(job)
    from sordino.simulate.images import Images

    return Images(job)
