"""Base classes of gossip algorithms: workers train on their own gradients, and mix parameters with a few peers.

To *mix* is to replace parameters by a weighted average of one's own and those of peers. Most algorithms differ only in
their topology: which workers mix, as a function of round, segment and rank that every worker computes by itself. The
method `rounds_of` returns the topologies of the mixings that make up one exchange.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from sordino._core import Topology
from sordino.algorithms.base import Algorithm, Simulation, Traits, made
from sordino.algorithms.checks import NO_BUFFERS, Buffers, is_count, require
from sordino.algorithms.traffic import Exchange, Model, Phase, Sent, Sets, Traffic, gradients, groups_of
from sordino.codecs import CODECS, Codec, FlatCodec, codec_of, flat_codec_of
from sordino.runtime.exchange.segments import Segments

if TYPE_CHECKING:
    from sordino.algorithms.gossip.mixing import Mixing, Peers
    from sordino.runtime.exchange.flat_buffer import ParameterBuffer


@dataclass(frozen=True)
class Gossip(Algorithm):
    """Gossip: steps on local gradients, and an exchange of parameters every `interval` steps.

    Attributes:
        interval: optimizer steps from one exchange to the next.
        buffers: "average" mixes the floating-point buffers given as `named_buffers` (BatchNorm's statistics) along with
            the parameters, "local" does not exchange them.
    """

    interval: int = 1
    buffers: Buffers = "local"

    def __post_init__(self) -> None:
        require(self.interval >= 1, self, "interval", "must be at least 1")
        require(self.buffers in ("local", "average"), self, "buffers", "must be 'local' or 'average'")

    steps = "sordino.algorithms.gossip.strategy:GossipStrategy"
    simulation = Simulation(refused={"buffers": NO_BUFFERS})
    weighted: ClassVar[bool] = False
    """Whether every segment of the parameters has a weight that is sent with it."""
    optional_state: ClassVar[frozenset[str]] = frozenset()
    """Keys of the mixing's state that a checkpoint may lack."""

    @property
    def traits(self) -> Traits:
        return Traits(
            averages_buffers=self.buffers == "average",
            sends_gradients=self.workers_in_group > 1,
            whole_parameters=None,
        )

    @property
    def every(self) -> int:
        """Optimizer steps from one exchange to the next."""
        return self.interval

    @property
    def leaders_only(self) -> bool:
        """Whether only the first rank of a group steps its optimizer."""
        return False

    @property
    def cut(self) -> Segments | Sequence[str]:
        """The rule by which parameters are cut into segments."""
        return "model"

    @abstractmethod
    def mixing(self, peers: Peers, values: ParameterBuffer) -> Mixing:
        """Return the object that performs exchanges on the parameters of one rank."""


@dataclass(frozen=True)
class MixingGossip(Gossip):
    """Gossip in which workers mix with a few peers, segment by segment.

    Attributes:
        segments: the parts that are mixed as units: "model" (the whole); "blocks" (the members of the model's outermost
            numbered containers, such as "model.layers.3" or "layer1.0", and the modules next to these containers; up to
            4 blocks are cut into pieces of at least 1 MiB); a number of bytes; or patterns of parameter names
            (fnmatch), one segment each, plus one for the parameters that match none. `print(optimizer)` shows the
            number of segments.
    """

    segments: Segments | Sequence[str] = "model"

    def __post_init__(self) -> None:
        super().__post_init__()
        segments = self.segments
        if isinstance(segments, int):
            require(is_count(segments, 1) and segments < 1 << 63, self, "segments", "must be at least 1 byte")
            return
        patterns = isinstance(segments, (list, tuple)) and all(isinstance(pattern, str) for pattern in segments)
        fine = segments in ("model", "blocks") or (patterns and len(segments) > 0)
        require(fine, self, "segments", "must be 'model', 'blocks', a number of bytes, or patterns of names")
        if patterns:
            object.__setattr__(self, "segments", tuple(segments))

    @property
    def cut(self) -> Segments | Sequence[str]:
        return self.segments

    @property
    def codec(self) -> FlatCodec | None:
        """The codec of the parameters that are sent; None: they are sent as they are."""
        return None

    @abstractmethod
    def rounds_of(self, size: int, segment_count: int) -> list[Topology]:
        """Return the topologies of the mixings of one exchange among `size` ranks, in order.

        Raises:
            UsageError: the algorithm does not work with this number of workers.
        """

    def mixing(self, peers: Peers, values: ParameterBuffer) -> Mixing:
        mixing: Mixing = made("sordino.algorithms.gossip.mixing:Averaging", peers, values, self)
        return mixing

    def traffic(self, model: Model, nodes: Sequence[int]) -> Traffic:
        size, members = len(nodes), self.workers_in_group
        exchanges = self._exchanges(size, model.segments(self.segments))
        if members == 1:
            return Traffic([exchanges])
        return Traffic([gradients(groups_of(size, members), model, self.traits.bucket_bytes), exchanges])

    def _exchanges(self, size: int, segments: Sequence[float], **options: Any) -> Phase:
        """Return the phase of the exchanges among `size` ranks; `segments` are the bytes of each segment."""
        all_workers, topologies = groups_of(size, size), self.rounds_of(size, len(segments))

        def exchange(round: int, sent: Sent | None) -> list[Exchange]:
            return [self._exchange(all_workers, topology, segments, round) for topology in topologies]

        return Phase(exchange, self.interval, **options)

    def _exchange(self, workers: Sets, topology: Topology, segments: Sequence[float], round: int) -> Exchange:
        """Return one mixing of an exchange."""
        return Exchange(workers, topology, segments, round, models=True)


@dataclass(frozen=True)
class AveragingGossip(MixingGossip):
    """Gossip in which workers take averages with a few peers, whose parameters can be sent encoded.

    Attributes:
        compression: codec of the parameters: `Int8()`, `Int4()`, `Float16()` or `BFloat16()`, or its name; None: they
            are sent as they are. The error of `Int8` and `Int4` is in proportion to the distance between workers.
            `optimizer.statistics` counts the blocks of values that were too far away to be decoded.
    """

    compression: Codec | str | None = field(default=None, kw_only=True)
    optional_state = frozenset({"distances"})  # it exists with a codec, from the first exchange on

    def __post_init__(self) -> None:
        super().__post_init__()
        codec = codec_of(self.compression, f"{self.label}(compression")
        object.__setattr__(self, "compression", codec)
        if codec is None:
            return
        if not _codes_near(codec):
            fitting = ", ".join(kind.__name__ for kind in CODECS.values() if _codes_near(kind()))
            fault = (
                "loses more than gossip can bear: peers change, so an exchange cannot send later what an earlier one "
                f"has lost. Use one of {fitting}"
            )
            require(False, self, "compression", fault)
        reason = "needs buffers='local': a variance that is sent encoded could become negative"
        require(self.buffers == "local", self, "compression", reason)

    @property
    def codec(self) -> FlatCodec | None:
        return flat_codec_of(self.compression, "compression")

    def _exchange(self, workers: Sets, topology: Topology, segments: Sequence[float], round: int) -> Exchange:
        codec = self.codec
        if codec is None or not only_averages(topology):
            return super()._exchange(workers, topology, segments, round)
        encoded = [codec.relative_size * one for one in segments]
        return Exchange(workers, topology, encoded, round, models=True, separate=True)


def _codes_near(codec: Codec) -> bool:
    """Return whether a codec has a `near_coder`, which gossip needs."""
    return isinstance(codec, FlatCodec) and codec.near_coder() is not None


def only_averages(topology: Topology) -> bool:
    """Return whether every worker keeps a share of its own values. `Star`, whose members copy a leader, does not."""
    return all(topology.row(0, 0, rank)[1] for rank in range(topology.size))


@dataclass(frozen=True)
class RandomGossip(AveragingGossip):
    """Gossip in which peers are drawn at random.

    Attributes:
        seed: seed of the random choice of peers; the same on all ranks.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.seed < 1 << 64, self, "seed", "must be from 0 to 2^64 - 1")
