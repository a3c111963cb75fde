"""All-reduce SGD: every step uses the average gradient of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sordino.algorithms.base import Algorithm, Simulation, Traits, made
from sordino.algorithms.traffic import Model, Traffic, gradients, groups_of
from sordino.errors import UsageError

if TYPE_CHECKING:
    from sordino.algorithms.strategy import Runtime, Strategy
    from sordino.runtime.gradients.options import Options


@dataclass(frozen=True)
class AllReduce(Algorithm):
    """Synchronous data parallelism: g = (1/N) sum of g_i, then the optimizer step. All workers stay equal.

    Sent per step and worker: 2(N-1)/N times the bytes of the gradients, in ceil(bytes / bucket_bytes) operations.
    Staleness: none, or one step with `double_buffering`. Memory: none beyond the gradients, or one buffer of their size
    where they persist between steps; with `double_buffering` the gradients once more.
    When a peer dies: every remaining rank gets `PeerLost`; parameters are those after the last complete step.
    Source: "AllReduce-SGD" in Crossover-SGD, "CSGD" in Layered SGD; tensor fusion as in Horovod (Sergeev & Del Balso
    2018, section 4); double buffering as in Oguni and Shudo (wide-area gossip, section 2.3).

    Attributes:
        bucket_bytes: gradients are reduced in buckets of up to this many bytes, each as soon as it is complete.
        double_buffering: a step uses the average gradient of the step before, w_{t+1} = w_t - lr g(w_{t-1}), so that a
            reduction can hide behind a whole step. The first step changes nothing. `optimizer.flush()` uses the last
            gradient; checkpoints keep it. Not with closures, GradScaler, sparse gradients or join(). A single rank
            uses the gradient of the same step, because it has no reduction to hide.
    """

    bucket_bytes: int = 16 * 1024 * 1024
    double_buffering: bool = False

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1:
            raise UsageError(f"AllReduce(bucket_bytes={self.bucket_bytes}): must be at least 1")
        if not isinstance(self.double_buffering, bool):
            raise UsageError(f"AllReduce(double_buffering={self.double_buffering!r}): must be True or False")

    simulation = Simulation(arrays="synchronous", imitated=frozenset({"bucket_bytes", "double_buffering"}))

    @property
    def traits(self) -> Traits:
        return Traits(
            same_gradients=True,
            late=self.double_buffering,
            takes_op=True,
            bucket_bytes=self.bucket_bytes,
            ends_with="AllReduce(double_buffering=True)" if self.double_buffering else None,
            whole_parameters="its checkpoints contain whole gradients" if self.double_buffering else None,
        )

    def check(self, options: Options) -> None:
        if self.double_buffering and options.adasum:
            raise UsageError(
                "double_buffering needs gradients, but op=Adasum sends the changes of steps; use one of them"
            )
        if self.double_buffering and options.codec is not None:
            raise UsageError(f"double_buffering cannot send gradients with {options.codec}; use one of them")

    def strategy(self, runtime: Runtime) -> Strategy:
        if runtime.adasum:
            steps = "sordino.algorithms.allreduce.adasum:AdasumStrategy"
        elif self.double_buffering:
            steps = "sordino.algorithms.allreduce.double_buffering:BufferedStrategy"
        else:
            steps = "sordino.algorithms.allreduce.strategy:AllReduceStrategy"
        strategy: Strategy = made(steps, runtime, self)
        return strategy

    def traffic(self, model: Model, nodes: Sequence[int]) -> Traffic:
        all_workers = groups_of(len(nodes), len(nodes))
        if self.double_buffering:
            return Traffic([gradients(all_workers, model, self.bucket_bytes, hides=1.0, step=True)], delay=1)
        return Traffic([gradients(all_workers, model, self.bucket_bytes)])

    @classmethod
    def candidates(cls, nodes: Sequence[int], interval: int) -> list[Algorithm]:
        return [cls(), cls(double_buffering=True)]
