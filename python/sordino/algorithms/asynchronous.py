"""Base class of asynchronous gossip algorithms, for slow links and for nodes of different speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sordino._core import RandomCycle
from sordino.algorithms.base import Algorithm, Traits
from sordino.algorithms.checks import Buffers, require
from sordino.algorithms.traffic import Copies, Exchange, Model, Phase, Traffic, groups_of


@dataclass(frozen=True)
class Asynchronous(Algorithm):
    """Gossip in which no worker waits for another one to reach a certain step.

    Attributes:
        interval: optimizer steps from one averaging to the next.
        seed: seed of the random choice of peers; the same on all ranks.
        buffers: "average" averages the floating-point buffers given as `named_buffers` along with the parameters,
            "local" does not average them.
    """

    interval: int = 1
    seed: int = 0
    buffers: Buffers = "local"

    def __post_init__(self) -> None:
        require(self.interval >= 1, self, "interval", "must be at least 1")
        require(0 <= self.seed < 1 << 64, self, "seed", "must be from 0 to 2^64 - 1")
        require(self.buffers in ("local", "average"), self, "buffers", "must be 'local' or 'average'")

    @property
    def traits(self) -> Traits:
        return Traits(
            synchronous=False,
            averages_buffers=self.buffers == "average",
            sends_gradients=False,
            whole_parameters="its pairs depend on time, so shards of one model would be mixed with different models",
        )

    def _exchanges(self, model: Model, nodes: Sequence[int], ways: int, copied: float, hidden: bool) -> Traffic:
        """Return the expected traffic. The actual traffic varies, because peers are drawn at random.

        Args:
            model: the names and sizes of the tensors that are trained.
            nodes: the node of each worker.
            ways: 1 if models travel in one direction, 2 for both.
            copied: number of times that a step reads or writes the bytes of the parameters.
            hidden: whether the next steps hide the traffic.
        """
        size = len(nodes)
        draw = Exchange(groups_of(size, size), RandomCycle(size, self.seed), [model.bytes], models=True)
        copies = Phase([Copies(copied * model.bytes)])
        return Traffic([Phase([draw] * ways, self.interval, hides=float(hidden), step=hidden), copies])

    @classmethod
    def candidates(cls, nodes: Sequence[int], interval: int) -> list[Algorithm]:
        return []  # workers rarely wait, so a slow link costs them staleness rather than time
