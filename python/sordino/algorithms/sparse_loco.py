"""SparseLoCo: DiLoCo without outer momentum, whose workers send only the largest changes, with error feedback."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sordino.algorithms.base import Algorithm, Simulation
from sordino.algorithms.checks import NO_BUFFERS, require
from sordino.algorithms.diloco import DiLoCo
from sordino.codecs import Codec, TopK

_LARGEST = TopK(contributors=True)
_LEAST_PUBLISHED = 15  # the shortest interval that its authors have tried


@dataclass(frozen=True)
class SparseLoCo(DiLoCo):
    """SparseLoCo: workers train alone, and send only the largest of their changes every `interval` steps.

    With outer parameters θ, the residual e_i that worker i has not sent yet (at first 0), and outer learning rate η,
    every `interval` steps: e_i = β e_i + (w_i - θ), s_i = the largest values of each chunk of e_i, in 2 bits,
    e_i = e_i - s_i, and θ = θ + η s. An element of s is the mean over the workers that have sent it. Then all workers
    continue from w_i = θ. Error feedback does what the outer momentum does in DiLoCo.

    Everything else is as in `DiLoCo`, also `fragments`, `overlap`, `mix` and `group_size`, which were not published
    with it. The residual of a worker is in its own `state_dict()`: a worker that resumes from the state of another one
    starts without it, with a warning. So do all workers after a loss.

    Sent per exchange and worker: N - 1 times 0.7 % of the bytes of a fragment in float32 (an all-gather). Staleness:
    none, or τ steps with `overlap`; workers drift apart for `interval` steps. Memory: six times the parameters (as in
    `DiLoCo`, and the residuals). When a peer dies: as in `DiLoCo`. Source: Sarfi et al. 2025, Algorithm 1, without the
    limit on the norms of workers that are not trusted.

    Attributes:
        interval: optimizer steps from one outer step of a fragment to the next, H; a multiple of `fragments`.
        outer_lr: outer learning rate, η.
        outer_momentum: momentum factor, μ, from 0 to below 1. It is 0 in the published algorithm.
        nesterov: whether the momentum is Nesterov's.
        compression: codec of the outer gradients, or its name.
        decay: factor by which the residual of a worker decays in an exchange, β, from 0 to 1.
    """

    interval: int = 30
    outer_lr: float | None = 1.0
    outer_momentum: float | None = 0.0
    compression: Codec | str | None = _LARGEST
    decay: float = 0.95

    simulation = Simulation(refused={"buffers": NO_BUFFERS})  # every worker is a thread with the real optimizer

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.compression is not None, self, "compression", "must be a codec; without one, use DiLoCo")
        require(0 <= self.decay <= 1, self, "decay", "must be from 0 to 1")

    @property
    def kept(self) -> float:
        return self.decay

    @classmethod
    def candidates(cls, nodes: Sequence[int], interval: int) -> list[Algorithm]:
        return [cls(interval)] if interval >= _LEAST_PUBLISHED else []
