"""SGP, stochastic gradient push: workers send shares of their parameters, with weights, along a directed graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sordino._core import Exponential, Topology
from sordino.algorithms.base import Algorithm, Simulation, Traits, made
from sordino.algorithms.checks import NO_BUFFERS, is_count, require
from sordino.algorithms.gossip import MixingGossip
from sordino.algorithms.traffic import Model, Traffic

if TYPE_CHECKING:
    from sordino.algorithms.gossip.mixing import Mixing, Peers
    from sordino.runtime.exchange.flat_buffer import ParameterBuffer

_WEIGHT = 8  # bytes of a segment's weight


@dataclass(frozen=True)
class PushSum(MixingGossip):
    """SGP, stochastic gradient push: after its own step each worker sends a share of its parameters to peers.

    The peers follow from a directed exponential graph. The worker keeps a share and adds the shares that it receives.
    Push-sum weights count the total share that each worker holds.

    With k peers, x_i = (x_i + sum of x_j) / (k + 1) over the workers j that send to i. The weights change in the same
    way and are sent along as float64; the model computes with x_i / weight_i. In round t worker i sends to i + 2^(tk),
    ..., i + 2^(tk + k - 1) modulo N (exponents modulo ceil(log2 N)). The sums over all workers and all messages in
    flight stay the same.

    With `overlap` = τ > 0 an exchange runs during the next τ steps. Received shares are added after exactly τ
    exchanges, even if they arrive earlier. A worker waits for peers that are further behind. `optimizer.flush()` adds
    the shares in flight at once. After a state is loaded, nothing is in flight.

    Sent per exchange and worker: k times the bytes of the parameters plus 8 bytes per segment, in k messages per
    segment. Staleness: τ exchanges. Memory: the parameters of k peers on other nodes; with overlap also τ + 1 times the
    parameters. When a peer dies: as Crossover. Source: Assran et al. 2019, Algorithms 1 and 2.

    Attributes:
        peers: number of peers, k, from 1 to ceil(log2 N); or k by the exchange from which it holds, such as
            {0: 1, 5000: 2}.
        overlap: exchanges that a message may take, τ; 0 waits for it at once.
    """

    peers: int | Mapping[int, int] = 1
    overlap: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        stages = self.stages
        whole = all(is_count(number, 0) for stage in stages.items() for number in stage)
        fine = whole and 0 in stages and min(stages.values()) >= 1
        require(fine, self, "peers", "must be at least 1, or {round: peers, ...} from round 0 on")
        require(self.overlap >= 0, self, "overlap", "must be at least 0")

    simulation = Simulation(
        arrays="push-sum",
        imitated=frozenset({"interval", "segments", "peers", "overlap"}),
        refused={"buffers": NO_BUFFERS},
    )
    weighted = True

    @property
    def traits(self) -> Traits:
        return replace(super().traits, late=self.overlap > 0)

    @property
    def stages(self) -> dict[int, int]:
        """Number of peers, by the exchange from which it holds."""
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
