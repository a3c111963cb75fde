"""Problem without data: worker i's loss is |x - a_i|^2 / 2, and its gradients are noisy.

All random numbers are hashes of (seed, worker, step), and there are no generators. So a worker gets the same noise
whether it steps alone or with all workers, and 10^5 workers are a few arrays.
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
_START = -1  # step number with which the a_i are drawn
_AHEAD = 16  # if fewer workers step, each draws its noise of this many steps at once
_BLOCKS = 4  # tensors of a worker, at most


class Quadratic:
    """Problem of workers with different optima a_i. The common optimum is the mean of the a_i.

    Attributes:
        size: elements of a worker's parameters, `job.dimension`.
        workers: number of workers.
        message_bytes: bytes of a message with a whole model.
        tensors: name and number of elements of each tensor of the parameters, in order. There are several, so that
            algorithms can cut the model into segments.
        parameters: parameters of all workers, float32 [workers, size], initially 0.
        targets: the a_i, float32 [workers, size], normally distributed around 1.
        optimum: mean of the a_i, float64 [size].

    Args:
        noise: standard deviation of the noise that is added to each element of a gradient.
    """

    def __init__(self, job: Job, noise: float = 0.1) -> None:
        self.size, self.workers = job.dimension, job.workers
        self.message_bytes = job.message_bytes
        blocks = np.array_split(np.arange(self.size), min(_BLOCKS, self.size))
        self.tensors = [(f"layers.{number}.weight", len(block)) for number, block in enumerate(blocks)]
        self.parameters: Floats = np.zeros((self.workers, self.size), np.float32)
        all_workers = np.arange(self.workers)
        self.targets: Floats = 1 + normal(job.seed, all_workers, np.full(self.workers, _START), self.size)
        self.optimum = self.targets.mean(axis=0, dtype=np.float64)
        self._lr, self._momentum = np.float32(job.lr), np.float32(job.momentum)
        self._noise, self._seed = np.float32(noise), job.seed
        self._drawn: Integers = np.zeros(self.workers, np.int64)  # gradients so far, by worker
        self._ahead: dict[int, tuple[int, Floats]] = {}  # by worker: number of a block of _AHEAD steps, its noise
        self._gradients: Floats = np.zeros_like(self.parameters)
        self._momenta: Floats | None = np.zeros_like(self.parameters) if job.momentum else None
        self._alive = np.ones(self.workers, np.bool_)
        self._best = math.inf

    @property
    def parameter_bytes(self) -> int:
        """Bytes of one worker's parameters."""
        return 4 * self.size

    # ---- some workers ------------------------------------------------------------------------------------------

    def gradient(self, workers: list[int]) -> None:
        """Compute and keep the gradient of the next step of each of these workers, at its current parameters."""
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
        """Return the noise of a worker's next step. Noise is drawn for a block of _AHEAD steps at once."""
        block, place = divmod(int(self._drawn[worker]), _AHEAD)
        found = self._ahead.get(worker)
        if found is None or found[0] != block:
            steps = np.arange(block * _AHEAD, (block + 1) * _AHEAD)
            noise = self._noise * normal(self._seed, np.full(_AHEAD, worker), steps, self.size)
            found = self._ahead[worker] = block, noise
        noise_of_step: Floats = found[1][place]
        return noise_of_step

    def kept_gradient(self, worker: int) -> torch.Tensor:
        """Return the gradient that `gradient` has computed, float32 [size]."""
        return torch.from_numpy(self._gradients[worker])

    def step(self, workers: list[int]) -> None:
        """Take a step of each of these workers with the gradient that `gradient` has kept."""
        rows = rows_of(workers)
        self._move(rows, self._gradients[rows])

    def leave(self, worker: int) -> None:
        """Exclude a dead worker from evaluations."""
        self._alive[worker] = False

    def values(self, worker: int) -> torch.Tensor:
        """Return the worker's row of `parameters`, float32 [size], without a copy."""
        return torch.from_numpy(self.parameters[worker])

    # ---- all workers -------------------------------------------------------------------------------------------

    def gradients(self) -> Floats:
        """Return the gradients of all workers' next step, float32 [workers, size]. The next call overwrites them."""
        np.subtract(self.parameters, self.targets, out=self._gradients)
        if self._noise:
            all_workers = np.arange(self.workers)
            self._gradients += self._noise * normal(self._seed, all_workers, self._drawn, self.size)
        self._drawn += 1
        return self._gradients

    def move(self, gradients: Floats) -> None:
        """Take a step of all workers with these gradients, float32 [workers, size] or [size]."""
        self._move(slice(0, self.workers), gradients)

    def evaluate(self) -> dict[str, float]:
        """Return mean distances of live workers: `distance` from the optimum, `consensus_distance` from their mean."""
        values = self.parameters if self._alive.all() else self.parameters[self._alive]
        distance = _mean_distance(values, self.optimum)
        self._best = min(self._best, distance)
        return {
            "distance": distance,
            "consensus_distance": _mean_distance(values, values.mean(axis=0, dtype=np.float64)),
        }

    def final(self) -> dict[str, float]:
        """Return the result of `evaluate`, and `best_distance`, the smallest `distance` of all evaluations."""
        return {**self.evaluate(), "best_distance": self._best}

    def _move(self, rows: Rows, gradients: Floats) -> None:
        if self._momenta is not None:
            gradients = self._momentum * self._momenta[rows] + gradients
            self._momenta[rows] = gradients
        self.parameters[rows] -= self._lr * gradients


class Trainee:
    """Worker of the quadratic as a torch module, for algorithms whose simulation uses the real optimizer."""

    def __init__(self, problem: Quadratic, worker: int) -> None:
        self._problem, self._worker = problem, worker
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList(torch.nn.Module() for _ in problem.tensors)
        begin = 0
        for layer, (_, length) in zip(self.model.layers, problem.tensors):
            layer.weight = torch.nn.Parameter(problem.values(worker)[begin : begin + length].clone())
            begin += length

    def backward(self) -> None:
        """Add the gradient of the next step to `grad` of the parameters."""
        parameters = list(self.model.parameters())
        self._problem.values(self._worker).copy_(torch.nn.utils.parameters_to_vector(parameters).detach())
        self._problem.gradient([self._worker])
        gradient = self._problem.kept_gradient(self._worker)
        # Through autograd, so that its hooks run, as with a network.
        (torch.nn.utils.parameters_to_vector(parameters) * gradient).sum().backward()


def normal(seed: int, workers: Integers, steps: Integers, dimension: int) -> Floats:
    """Return normally distributed numbers, float32 [rows, dimension].

    Each is a function of seed, worker, step and column: Box-Muller of both halves of a hash (splitmix64).

    Args:
        seed: any integer, taken modulo 2^64.
        workers: worker of each row, int64 [rows].
        steps: step of each row, int64 [rows].
        dimension: numbers per row.
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
    """Apply the finalizer of splitmix64: every bit of a result depends on every bit of its value."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _mean_distance(values: Floats, place: NDArray[np.float64]) -> float:
    """Return the mean distance of the rows from a point."""
    return float(np.sqrt(np.square(values - place).sum(axis=1)).mean())
