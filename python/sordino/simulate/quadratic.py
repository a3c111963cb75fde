"""Training without data: worker i's loss is |x - a_i|^2 / 2, and its gradients carry noise.

Everything random is a hash of (seed, worker, step), so a worker sees the same noise whether it steps alone or all step
at once, nothing is kept for it, and 10^5 workers are a few arrays.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from sordino.simulate.record import Rows, rows_of

if TYPE_CHECKING:
    from sordino.simulate.job import Job

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]

_GOLDEN = 0x9E3779B97F4A7C15
_START = -1  # the step whose draws are the a_i
_AHEAD = 16  # steps for which a worker that steps alone draws at once
_BLOCKS = 4  # tensors that the parameters are made of


class Quadratic:
    """Workers that each want to be somewhere else, and together at the mean of those places.

    Attributes:
        size: elements of a worker's parameters, `job.dimension`.
        workers: how many there are.
        message_bytes: of a whole model, as links see it.
        tensors: that the parameters are made of: the name and the elements of each, in order. There are several, so
            that algorithms have something to cut.
        parameters: of all workers, float32 [workers, size]; 0 to begin with.
        targets: the a_i, float32 [workers, size], normally distributed around 1.
        optimum: their mean, float64 [size].

    Args:
        noise: standard deviation of what is added to each element of a gradient.
    """

    def __init__(self, job: Job, noise: float = 0.1) -> None:
        self.size, self.workers = job.dimension, job.workers
        self.message_bytes = job.message_bytes
        blocks = np.array_split(np.arange(self.size), min(_BLOCKS, self.size))
        self.tensors = [(f"layers.{number}.weight", len(block)) for number, block in enumerate(blocks)]
        self.parameters: Floats = np.zeros((self.workers, self.size), np.float32)
        everybody = np.arange(self.workers)
        self.targets: Floats = 1 + normal(job.seed, everybody, np.full(self.workers, _START), self.size)
        self.optimum = self.targets.mean(axis=0, dtype=np.float64)
        self._lr, self._momentum = np.float32(job.lr), np.float32(job.momentum)
        self._noise, self._seed = np.float32(noise), job.seed
        self._drawn: Integers = np.zeros(self.workers, np.int64)  # gradients, by worker
        self._ahead: dict[int, tuple[int, Floats]] = {}  # of which steps, and the noise; of workers that step alone
        self._gradients: Floats = np.zeros_like(self.parameters)
        self._momenta: Floats | None = np.zeros_like(self.parameters) if job.momentum else None
        self._alive = np.ones(self.workers, np.bool_)
        self._best = math.inf

    @property
    def parameter_bytes(self) -> int:
        """Of one worker's parameters."""
        return 4 * self.size

    # ---- some workers ------------------------------------------------------------------------------------------

    def gradient(self, workers: list[int]) -> None:
        """Compute the gradient of each of these workers' next step at its parameters as they are now, and keep it."""
        rows = rows_of(workers)
        found = self.parameters[rows] - self.targets[rows]
        if self._noise and len(workers) >= _AHEAD:
            found += self._noise * normal(self._seed, np.array(workers), self._drawn[rows], self.size)
        elif self._noise:
            for row, worker in zip(found.reshape(-1, self.size), workers):
                row += self._drawn_ahead(worker)
        self._gradients[rows] = found
        self._drawn[rows] += 1

    def _drawn_ahead(self, worker: int) -> Floats:
        """Return the noise of a worker's next step, drawn with that of others to come."""
        block, place = divmod(int(self._drawn[worker]), _AHEAD)
        found = self._ahead.get(worker)
        if found is None or found[0] != block:
            steps = np.arange(block * _AHEAD, (block + 1) * _AHEAD)
            noise = self._noise * normal(self._seed, np.full(_AHEAD, worker), steps, self.size)
            found = self._ahead[worker] = block, noise
        noise_of_step: Floats = found[1][place]
        return noise_of_step

    def kept_gradient(self, worker: int) -> torch.Tensor:
        """Return what `gradient` has computed, float32 [size]."""
        return torch.from_numpy(self._gradients[worker])

    def step(self, workers: list[int]) -> None:
        """Move the parameters of each of these workers by the gradient that was computed last."""
        rows = rows_of(workers)
        self._move(rows, self._gradients[rows])

    def leave(self, worker: int) -> None:
        """Take in that the worker is dead: what is evaluated is that of the others."""
        self._alive[worker] = False

    def values(self, worker: int) -> torch.Tensor:
        """Return the worker's parameters, float32 [size]: the memory itself."""
        return torch.from_numpy(self.parameters[worker])

    # ---- all at once -------------------------------------------------------------------------------------------

    def gradients(self) -> Floats:
        """Return the gradients of everybody's next step, float32 [workers, size]; the next call overwrites them."""
        np.subtract(self.parameters, self.targets, out=self._gradients)
        if self._noise:
            everybody = np.arange(self.workers)
            self._gradients += self._noise * normal(self._seed, everybody, self._drawn, self.size)
        self._drawn += 1
        return self._gradients

    def move(self, gradients: Floats) -> None:
        """Take everybody's step by these gradients, float32 [workers, size] or [size]."""
        self._move(slice(0, self.workers), gradients)

    def evaluate(self) -> dict[str, float]:
        """Return means over the workers, of two distances.

        `distance` is from the optimum, and `consensus_distance` from the mean of them all.
        """
        values = self.parameters if self._alive.all() else self.parameters[self._alive]
        distance = _mean_distance(values, self.optimum)
        self._best = min(self._best, distance)
        return {
            "distance": distance,
            "consensus_distance": _mean_distance(values, values.mean(axis=0, dtype=np.float64)),
        }

    def final(self) -> dict[str, float]:
        """Return what `evaluate` does, and `best_distance`, the least that it has ever found."""
        return {**self.evaluate(), "best_distance": self._best}

    def _move(self, rows: Rows, gradients: Floats) -> None:
        if self._momenta is not None:
            gradients = self._momentum * self._momenta[rows] + gradients
            self._momenta[rows] = gradients
        self.parameters[rows] -= self._lr * gradients


class Trainee:
    """A worker of the quadratic, as a torch module: for algorithms that only the real optimizer knows."""

    def __init__(self, problem: Quadratic, worker: int) -> None:
        self._problem, self._worker = problem, worker
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList(torch.nn.Module() for _ in problem.tensors)
        begin = 0
        for layer, (_, length) in zip(self.model.layers, problem.tensors):
            layer.weight = torch.nn.Parameter(problem.values(worker)[begin : begin + length].clone())
            begin += length

    def backward(self) -> None:
        """Add the gradient of the next step to the parameters' `grad`."""
        parameters = list(self.model.parameters())
        self._problem.values(self._worker).copy_(torch.nn.utils.parameters_to_vector(parameters).detach())
        self._problem.gradient([self._worker])
        gradient = self._problem.kept_gradient(self._worker)
        # Through autograd, as a network's would come.
        (torch.nn.utils.parameters_to_vector(parameters) * gradient).sum().backward()


def normal(seed: int, workers: Integers, steps: Integers, dimension: int) -> Floats:
    """Return normally distributed numbers that are the same for the same seed, worker, step and place.

    They are float32 [workers, dimension]: Box-Muller on both halves of a hash (splitmix64).

    Args:
        seed: any integer, taken modulo 2^64.
        workers: of each row; integers [workers].
        steps: of each row; of the same length.
        dimension: how many numbers a row has.
    """
    pairs = -(-dimension // 2)
    with np.errstate(over="ignore"):
        key = _mixed(workers.astype(np.uint64) * np.uint64(_GOLDEN) + _mixed(np.array(seed % (1 << 64), np.uint64)))
        key = _mixed(key ^ _mixed(steps.astype(np.int64).view(np.uint64) + np.uint64(_GOLDEN)))
        bits = _mixed(key[:, None] + np.arange(1, pairs + 1, dtype=np.uint64) * np.uint64(_GOLDEN))
    high = ((bits >> np.uint64(32)).astype(np.float32) + np.float32(1)) * np.float32(2.0**-32)  # in (0, 1]
    angle = (bits & np.uint64(0xFFFFFFFF)).astype(np.float32) * np.float32(2 * math.pi * 2.0**-32)
    radius = np.sqrt(np.float32(-2) * np.log(np.minimum(high, np.float32(1))))
    found = np.empty((len(workers), 2 * pairs), np.float32)
    np.multiply(radius, np.cos(angle), out=found[:, ::2])
    np.multiply(radius, np.sin(angle), out=found[:, 1::2])
    return np.ascontiguousarray(found[:, :dimension])


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the finalizer of splitmix64: every bit of the result depends on every bit of the value."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _mean_distance(values: Floats, place: NDArray[np.float64]) -> float:
    """Return the mean distance of the rows from a place."""
    return float(np.sqrt(np.square(values - place).sum(axis=1)).mean())
