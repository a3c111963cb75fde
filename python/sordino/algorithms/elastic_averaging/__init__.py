"""EASGD, elastic averaging: workers move towards a shared center, and the center moves towards their mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sordino.algorithms.base import Simulation, Traits, made
from sordino.algorithms.checks import NO_BUFFERS, require
from sordino.algorithms.gossip import Gossip
from sordino.algorithms.traffic import Copies, Model, Phase, Reduction, Traffic, groups_of

if TYPE_CHECKING:
    from sordino.algorithms.gossip.mixing import Mixing, Peers
    from sordino.runtime.exchange.flat_buffer import ParameterBuffer


@dataclass(frozen=True)
class ElasticAveraging(Gossip):
    """EASGD, elastic averaging: every `interval` steps workers and a center move towards each other.

    Each worker moves towards the center, and the center towards the mean of the workers.

    With alpha = moving_rate / N: w_i = w_i - alpha (w_i - c) and c = c + alpha * sum over j of (w_j - c), both from the
    values before the exchange. Every worker holds an equal copy of the center, so no server is needed. The center
    starts as the mean of the workers' parameters before the first step, and is part of `state_dict()`. It starts anew
    after a loss, and if parameters are unfrozen or added.

    Sent per exchange and worker: 2(N - 1)/N times the bytes of the parameters (an all-reduce). Staleness: none. Memory:
    twice the parameters. When a peer dies: every remaining rank gets `PeerLost` and keeps its parameters from before
    the exchange. Source: Zhang, Choromanska and LeCun 2015, Algorithm 1 (synchronous), beta = moving_rate.

    Attributes:
        moving_rate: fraction of the way to the mean that the center moves, above 0 and up to 1; the source's beta.
    """

    moving_rate: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.moving_rate <= 1, self, "moving_rate", "must be above 0 and at most 1")

    optional_state = frozenset({"parameters", "centre"})  # they exist from the first step on
    simulation = Simulation(
        arrays="elastic",
        imitated=frozenset({"interval", "moving_rate"}),
        refused={"buffers": NO_BUFFERS},
    )

    @property
    def traits(self) -> Traits:
        return replace(super().traits, whole_parameters="its checkpoints contain the whole center")

    def mixing(self, peers: Peers, values: ParameterBuffer) -> Mixing:
        mixing: Mixing = made("sordino.algorithms.elastic_averaging.mixing:ElasticMixing", peers, values, self)
        return mixing

    def traffic(self, model: Model, nodes: Sequence[int]) -> Traffic:
        mean = Reduction(groups_of(len(nodes), len(nodes)), [model.bytes])
        # Copying the values to average, and moving the parameters and the center.
        movements = Copies(8 * model.bytes)
        # Before the first step the mean of all parameters becomes the center.
        return Traffic([Phase([mean], until=1), Phase([mean, movements], self.interval)])
