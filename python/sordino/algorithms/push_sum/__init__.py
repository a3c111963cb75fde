"""SGP, stochastic gradient push: shares of the parameters go along a directed graph, and weights with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sordino._core import Exponential, Topology
from sordino.algorithms.base import Algorithm, Simulation, Traits, made
from sordino.algorithms.checks import NO_BUFFERS, require
from sordino.algorithms.gossip import MixingGossip
from sordino.algorithms.traffic import Model, Traffic

if TYPE_CHECKING:
    from sordino.algorithms.gossip.mixing import Mixing, Peers
    from sordino.runtime.flat_buffer import ParameterBuffer

_WEIGHT = 8  # bytes of a segment's weight


@dataclass(frozen=True)
class PushSum(MixingGossip):
    """SGP, stochastic gradient push: after its own step each worker sends a share of its parameters to peers.

    They are its peers along the directed exponential graph; it keeps a share, and adds up what arrives. Push-sum
    weights tell how much each has got.

    With k peers, x_i = (x_i + sum of x_j) / (k + 1) over those j that send to i, and so the weights, sent along as
    float64; the model computes with x_i / weight_i. In round t worker i sends to i + 2^(tk), ..., i + 2^(tk + k - 1)
    modulo N (exponents modulo ceil(log2 N)). The sums over the workers and what is under way stay the same.

    With `overlap` = τ > 0 an exchange runs beside the next τ steps, and what it brought is added after exactly τ
    exchanges, however early it came; a worker waits for peers that are further behind than that.
    `optimizer.flush()` adds what is under way at once. A state that is loaded begins with nothing under way.

    Sent per exchange and worker: k times the bytes of the parameters and 8 a segment, k messages a segment. Staleness:
    τ exchanges. Memory: the parameters of k peers on other nodes; with overlap τ + 1 times the parameters besides.
    When a peer dies: as Crossover. Source: Assran et al. 2019, Algorithms 1 and 2.

    Attributes:
        peers: how many, from 1 to ceil(log2 N); or from which exchange on how many, such as {0: 1, 5000: 2}.
        overlap: exchanges that a message may take, τ; 0 waits for it.
    """

    peers: int | Mapping[int, int] = 1
    overlap: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        stages = self.stages
        whole = all(isinstance(number, int) for stage in stages.items() for number in stage)
        fine = whole and 0 in stages and min(stages) >= 0 and min(stages.values()) >= 1
        require(fine, self, "peers", "must be at least 1, or {round: peers, ...} from round 0 on")
        require(isinstance(self.overlap, int) and self.overlap >= 0, self, "overlap", "must be at least 0")

    simulation = Simulation(
        arrays="sordino.simulate.vectorized:PushSum",
        imitated=frozenset({"interval", "segments", "peers", "overlap"}),
        refused={"buffers": NO_BUFFERS},
    )
    weighted = True

    @property
    def traits(self) -> Traits:
        return replace(super().traits, late=self.overlap > 0)

    @property
    def stages(self) -> dict[int, int]:
        """From which exchange on there are how many peers."""
        return dict(self.peers) if isinstance(self.peers, Mapping) else {0: self.peers}

    def rounds_of(self, size: int, segment_count: int) -> list[Topology]:
        return [Exponential(size, self.stages)]

    def mixing(self, peers: Peers, values: ParameterBuffer) -> Mixing:
        mixing: Mixing = made("sordino.algorithms.push_sum.mixing:PushSumMixing", peers, values, self)
        return mixing

    def traffic(self, model: Model, nodes: Sequence[int]) -> Traffic:
        segments = [count + _WEIGHT for count in model.segments(self.segments)]
        late = self.overlap > 0
        return Traffic([self._exchanges(len(nodes), segments, hides=float(late), step=late)], delay=self.overlap)

    def fitted(self, before: Sequence[int], now: Sequence[int]) -> PushSum:
        most = max(1, (len(now) - 1).bit_length())
        return replace(self, peers={begin: min(count, most) for begin, count in self.stages.items()})

    @classmethod
    def candidates(cls, nodes: Sequence[int], interval: int) -> list[Algorithm]:
        return [cls(), cls(overlap=1)]
