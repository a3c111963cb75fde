"""Training without data: worker i's loss is |x - a_i|^2 / 2, and its gradients carry noise.

Everything random is a hash of (seed, worker, step), so a worker sees the same noise whether it steps alone or all step
at once, nothing is kept for it, and 10^5 workers are a few arrays.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]

_GOLDEN = 0x9E3779B97F4A7C15
_START = -1  # the step whose draws are the a_i


class Quadratic:
    """Workers that each want to be somewhere else, and together at the mean of those places.

    Attributes:
        size: how many workers there are.
        dimension: elements of the parameters.
        lr, momentum: of the steps, as torch.optim.SGD's.
        names: of the tensors that the parameters are made of.
        elements: of each of them.
        parameters: of all workers, [size, dimension], float32; 0 to begin with.
        targets: the a_i, [size, dimension], normally distributed.
        optimum: their mean, [dimension], float64.
        steps: that each worker has taken, [size].

    Args:
        noise: standard deviation of what is added to each element of a gradient.
        blocks: how many tensors there are, so that algorithms have something to cut; at most `dimension`.
    """

    def __init__(
        self,
        size: int,
        dimension: int = 8,
        lr: float = 0.01,
        momentum: float = 0.0,
        noise: float = 0.1,
        seed: int = 0,
        blocks: int = 4,
    ) -> None:
        self.size, self.dimension, self.lr, self.momentum = size, dimension, lr, momentum
        self._noise, self._seed = noise, seed
        self.elements = [len(part) for part in np.array_split(np.arange(dimension), min(blocks, dimension))]
        self.names = [f"layers.{number}.weight" for number in range(len(self.elements))]
        self.parameters: Floats = np.zeros((size, dimension), np.float32)
        self.targets: Floats = normal(seed, np.arange(size), np.full(size, _START), dimension)
        self.optimum = self.targets.mean(axis=0, dtype=np.float64)
        self.steps: Integers = np.zeros(size, np.int64)
        self._momenta: Floats | None = np.zeros_like(self.parameters) if momentum else None

    @property
    def parameter_bytes(self) -> int:
        """Of one worker's parameters."""
        return 4 * self.dimension

    # ---- one worker --------------------------------------------------------------------------------------------

    def step(self, worker: int) -> None:
        """One step of one worker, on its own gradient."""
        only = slice(worker, worker + 1)
        self._move(only, self._gradients(only))

    def values(self, worker: int) -> torch.Tensor:
        """The parameters of a worker, float32 [dimension], in place: who writes there changes them."""
        return torch.from_numpy(self.parameters[worker])

    def gradient(self, worker: int) -> torch.Tensor:
        """The gradient that the worker's next step would use, float32 [dimension]."""
        return torch.from_numpy(self._gradients(slice(worker, worker + 1))[0])

    # ---- all at once -------------------------------------------------------------------------------------------

    def gradients(self) -> Floats:
        """The gradients of everybody's next step, [size, dimension]."""
        return self._gradients(slice(None))

    def move(self, gradients: Floats) -> None:
        """Everybody's step by these gradients, [size, dimension]."""
        self._move(slice(None), gradients)

    def evaluate(self) -> dict[str, float]:
        """`distance`: of the workers from the optimum, `consensus_distance`: from their mean; both Euclidean, and the
        mean over the workers."""
        mean = self.parameters.mean(axis=0, dtype=np.float64)
        return {
            "distance": _mean_distance(self.parameters, self.optimum),
            "consensus_distance": _mean_distance(self.parameters, mean),
        }

    def _gradients(self, workers: slice) -> Floats:
        found = self.parameters[workers] - self.targets[workers]
        if self._noise:
            numbers = np.arange(self.size)[workers] if workers.start is None else np.array([workers.start])
            found += np.float32(self._noise) * normal(self._seed, numbers, self.steps[workers], self.dimension)
        return found

    def _move(self, workers: slice, gradients: Floats) -> None:
        if self._momenta is not None:
            momenta = self._momenta[workers]
            momenta *= np.float32(self.momentum)
            momenta += gradients
            gradients = momenta
        self.parameters[workers] -= np.float32(self.lr) * gradients
        self.steps[workers] += 1


def normal(seed: int, workers: Integers, steps: Integers, dimension: int) -> Floats:
    """Normally distributed numbers that are the same for the same seed, worker, step and place, float32
    [workers, dimension]. Box-Muller on both halves of a hash (splitmix64).

    Args:
        workers, steps: of the same length.
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
    """The finalizer of splitmix64: every bit of the result depends on every bit of the value."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _mean_distance(values: Floats, place: NDArray[np.float64]) -> float:
    return float(np.sqrt(np.square(values - place).sum(axis=1)).mean())
