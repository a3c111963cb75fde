"""What gossip algorithms have in common: workers train on their own gradients, and mix their parameters.

They mix them with a few others', never with all at once.

Most of them differ in their topology alone: who mixes with whom, a function of round, segment and rank that every
worker computes by itself. Each says in `rounds_of` which mixings one exchange is made of.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from sordino._core import Topology
from sordino.algorithms.base import Algorithm, Simulation, Traits, made
from sordino.algorithms.checks import NO_BUFFERS, Buffers, require
from sordino.algorithms.traffic import Exchange, Model, Phase, Sent, Traffic, groups_of
from sordino.runtime.segments import Segments

if TYPE_CHECKING:
    from sordino.algorithms.gossip.mixing import Mixing, Peers
    from sordino.runtime.flat_buffer import ParameterBuffer


@dataclass(frozen=True)
class Gossip(Algorithm):
    """Gossip of any kind: steps on local gradients, and every `interval` steps an exchange of parameters.

    Attributes:
        interval: optimizer steps from one exchange to the next.
        buffers: "average" mixes the floating-point buffers given as `named_buffers` (BatchNorm's statistics) along with
            the parameters, "local" leaves every worker its own.
    """

    interval: int = 1
    buffers: Buffers = "local"

    def __post_init__(self) -> None:
        require(isinstance(self.interval, int) and self.interval >= 1, self, "interval", "must be at least 1")
        require(self.buffers in ("local", "average"), self, "buffers", "must be 'local' or 'average'")

    steps = "sordino.algorithms.gossip.strategy:GossipStrategy"
    simulation = Simulation(refused={"buffers": NO_BUFFERS})
    weighted: ClassVar[bool] = False
    """Whether every segment of the parameters has a weight that travels along."""
    optional_state: ClassVar[frozenset[str]] = frozenset()
    """What of its mixing's state a checkpoint may lack."""

    @property
    def traits(self) -> Traits:
        return Traits(averages_buffers=self.buffers == "average", sends_gradients=self.workers_in_group > 1)

    @property
    def leaders_only(self) -> bool:
        """Whether only the first rank of a group steps its optimizer."""
        return False

    @property
    def cut(self) -> Segments | Sequence[str]:
        """How parameters are cut into segments."""
        return "model"

    @abstractmethod
    def mixing(self, peers: Peers, values: ParameterBuffer) -> Mixing:
        """Return what an exchange does to the parameters of one rank."""


@dataclass(frozen=True)
class MixingGossip(Gossip):
    """Gossip in which workers mix with some peers, segment by segment.

    Attributes:
        segments: what is mixed as one: "model"; "blocks" (the members of the model's outermost numbered containers, as
            "model.layers.3" or "layer1.0", and the modules beside them; up to 4 blocks are cut into pieces of at least
            1 MiB); a number of bytes; or patterns of parameter names (fnmatch), a segment each, the parameters that
            match none being one more. `print(optimizer)` tells how many segments there are.
    """

    segments: Segments | Sequence[str] = "model"

    def __post_init__(self) -> None:
        super().__post_init__()
        segments = self.segments
        if isinstance(segments, int):
            require(segments >= 1, self, "segments", "must be at least 1 byte")
        elif isinstance(segments, str):
            require(segments in ("model", "blocks"), self, "segments", "must be 'model', 'blocks', bytes or patterns")
        else:
            patterns = all(isinstance(pattern, str) for pattern in segments) and len(segments) > 0
            require(patterns, self, "segments", "must be 'model', 'blocks', bytes or patterns")
            object.__setattr__(self, "segments", tuple(segments))

    @property
    def cut(self) -> Segments | Sequence[str]:
        return self.segments

    @abstractmethod
    def rounds_of(self, size: int, segment_count: int) -> list[Topology]:
        """Return the mixings of one exchange among `size` ranks, one after the other.

        Raises:
            UsageError: the algorithm cannot serve so many workers.
        """

    def mixing(self, peers: Peers, values: ParameterBuffer) -> Mixing:
        mixing: Mixing = made("sordino.algorithms.gossip.mixing:Averaging", peers, values, self)
        return mixing

    def traffic(self, model: Model, nodes: Sequence[int]) -> Traffic:
        return Traffic([self._exchanges(len(nodes), model.segments(self.segments))])

    def _exchanges(self, size: int, segments: Sequence[float], **options: Any) -> Phase:
        """Return the phase of the exchanges of `size` ranks, of segments of so many bytes."""
        everybody, topologies = groups_of(size, size), self.rounds_of(size, len(segments))

        def exchange(round: int, sent: Sent | None) -> list[Exchange]:
            return [Exchange(everybody, topology, segments, round, models=True) for topology in topologies]

        return Phase(exchange, self.interval, **options)


@dataclass(frozen=True)
class RandomGossip(MixingGossip):
    """Mixing with peers that are drawn.

    Attributes:
        seed: of the draws; the same on all ranks.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(isinstance(self.seed, int) and 0 <= self.seed < 1 << 64, self, "seed", "must be from 0 to 2^64 - 1")
