"""Gossip: workers train on their own gradients and mix their parameters with a few others', never with all at once.

The classes differ in their topology alone: who mixes with whom, a function of round, segment and rank that every worker
computes by itself. Each says in `rounds_of` which mixings one exchange is made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sordino._core import Dissemination, Grouped, RandomCycle, RandomPull, Ring, Roulette, Star, Topology
from sordino.errors import UsageError

Segments = str | int | tuple[str, ...]
Buffers = Literal["local", "average"]


def _require(condition: bool, owner: object, field: str, must: str) -> None:
    if not condition:
        raise UsageError(f"{type(owner).__name__}({field}={getattr(owner, field)!r}): {must}")


@dataclass(frozen=True)
class _Gossip:
    """What all gossip algorithms are told.

    Attributes:
        interval: optimizer steps from one exchange to the next.
        segments: what is mixed as one: "model"; "blocks" (a model's top-level modules, and the members of its numbered
            containers: residual blocks and the classifier); a number of bytes; or patterns of parameter names
            (fnmatch), a segment each, the parameters that match none being one more.
        buffers: "average" mixes the floating-point buffers given as `named_buffers` (BatchNorm's statistics) along with
            the parameters, "local" leaves every worker its own.
        seed: of the random choices; the same on all ranks.
    """

    interval: int = 1
    segments: Segments | Sequence[str] = "model"
    buffers: Buffers = "local"
    seed: int = 0

    def __post_init__(self) -> None:
        _require(isinstance(self.interval, int) and self.interval >= 1, self, "interval", "must be at least 1")
        _require(self.buffers in ("local", "average"), self, "buffers", "must be 'local' or 'average'")
        _require(isinstance(self.seed, int) and 0 <= self.seed < 1 << 64, self, "seed", "must be from 0 to 2^64 - 1")
        segments = self.segments
        if isinstance(segments, int):
            _require(segments >= 1, self, "segments", "must be at least 1 byte")
        elif isinstance(segments, str):
            _require(segments in ("model", "blocks"), self, "segments", "must be 'model', 'blocks', bytes or patterns")
        else:
            patterns = all(isinstance(pattern, str) for pattern in segments) and len(segments) > 0
            _require(patterns, self, "segments", "must be 'model', 'blocks', bytes or patterns")
            object.__setattr__(self, "segments", tuple(segments))

    @property
    def workers_in_group(self) -> int:
        """Neighbouring ranks that train as one worker."""
        return 1

    @property
    def leaders_only(self) -> bool:
        """Whether only the first rank of a group steps its optimizer."""
        return False

    def rounds_of(self, size: int, segment_count: int) -> list[Topology]:
        """The mixings of one exchange among `size` ranks, one after the other.

        Raises:
            UsageError: the algorithm cannot serve so many workers.
        """
        raise UsageError(f"{type(self).__name__} has no topology")


@dataclass(frozen=True)
class Crossover(_Gossip):
    """Crossover-SGD: after its own step each worker averages every segment with one random peer's, another peer for
    each segment, such that everybody sends and receives exactly one copy of each.

    w_i[s] = (w_i[s] + w_j[s]) / 2 with j drawn for (seed, round, s): a random cycle through all workers, so every pair
    is equally likely and the sum over the workers stays the same. With `group_size` = K, neighbouring ranks form groups
    that average their gradients (all-reduce in backward) and exchange as one worker; K = N is AllReduce, K = 1 plain
    Crossover.

    Sent per exchange and worker: the bytes of the parameters, one message a segment (none within a node); in groups of
    K, the leader sends them once to every node of the receiving group, and each member 2(K-1)/K times the gradients per
    step inside the group. Staleness: none. Memory: the parameters of one peer where that lives on another node. When a
    peer dies: every survivor gets `PeerLost`; each element of its parameters is the one before or after the exchange.
    Source: Yeo et al., Crossover-SGD, section 3, Algorithms 1 and 2, section 3.3. The topology differs: Algorithm 2
    takes O(N^2) and can come to a dead end; this one takes O(1) and cannot.

    Attributes:
        group_size: ranks in a group; must divide the number of workers.
        within: "allreduce": every member of a group applies the average gradient; "leader": only its first rank does,
            and hands the parameters to the others after the exchange. The parameters are the same.
        roulette: weights[i][j] of worker (or group) i sending to j, or None for equal ones; what is not doubly
            stochastic is scaled to the nearest matrix that is. Up to 128 workers.
        segment_bytes: gradients are reduced within groups in segments of up to this many bytes.
    """

    segments: Segments | Sequence[str] = "blocks"
    group_size: int = 1
    within: Literal["allreduce", "leader"] = "allreduce"
    roulette: Sequence[Sequence[float]] | None = None
    segment_bytes: int = 16 * 1024 * 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(isinstance(self.group_size, int) and self.group_size >= 1, self, "group_size", "must be at least 1")
        _require(self.within in ("allreduce", "leader"), self, "within", "must be 'allreduce' or 'leader'")
        _require(self.segment_bytes >= 1, self, "segment_bytes", "must be at least 1")
        if self.roulette is not None:
            object.__setattr__(self, "roulette", tuple(tuple(float(weight) for weight in row) for row in self.roulette))

    @property
    def workers_in_group(self) -> int:
        return self.group_size

    @property
    def leaders_only(self) -> bool:
        return self.within == "leader" and self.group_size > 1

    def rounds_of(self, size: int, segment_count: int) -> list[Topology]:
        if size % self.group_size != 0:
            raise UsageError(f"Crossover(group_size={self.group_size}): does not divide {size} ranks into equal groups")
        groups = size // self.group_size
        among: Topology
        if self.roulette is None:
            among = RandomCycle(groups, self.seed)
        else:
            among = Roulette(groups, self.seed, [weight for row in self.roulette for weight in row])
        if self.group_size == 1:
            return [among]
        rounds: list[Topology] = [Grouped(among, self.group_size, self.leaders_only)] if groups > 1 else []
        return [*rounds, Star(size, self.group_size)] if self.leaders_only else rounds


@dataclass(frozen=True)
class DPSGD(_Gossip):
    """D-PSGD: after its own step each worker takes the mean of its parameters and both neighbours' on a ring.

    w_i = (w_{i-1} + w_i + w_{i+1}) / 3, for two workers / 2: a symmetric, doubly stochastic mixing.

    Sent per exchange and worker: twice the bytes of the parameters (once for two workers), two messages a segment.
    Staleness: none. Memory: the parameters of neighbours on other nodes. When a peer dies: as Crossover.
    Source: Lian et al. 2017, Algorithm 1 (mixing after the local step instead of beside it).
    """

    def rounds_of(self, size: int, segment_count: int) -> list[Topology]:
        return [Ring(size)]


@dataclass(frozen=True)
class GossipGraD(_Gossip):
    """GossipGraD: after its own step each worker averages with the rank 2^(t mod log2 N) places before it, under a
    permutation drawn anew every ceil(log2 N) rounds; within those rounds every worker's values reach all others.

    Sent per exchange and worker: the bytes of the parameters, one message a segment. Staleness: none. Memory: the
    parameters of one peer where that lives on another node. When a peer dies: as Crossover.
    Source: Daily et al. 2018, sections 4.3 and 4.5.
    """

    def rounds_of(self, size: int, segment_count: int) -> list[Topology]:
        return [Dissemination(size, self.seed)]


@dataclass(frozen=True)
class SegmentedGossip(_Gossip):
    """COMBO: after its own step each worker pulls every segment from `replicas` random others and averages; over the
    segments it asks every other worker when segments * replicas >= N - 1. Nobody balances who is asked.

    Received per exchange and worker: `replicas` times the bytes of the parameters; sent: as much on average, between
    nothing and N - 1 times as much. Staleness: none. Memory: the parameters of `replicas` peers on other nodes. When a
    peer dies: as Crossover. Source: Hu et al. 2019, section 3.

    Attributes:
        replicas: workers that each segment is pulled from.
    """

    segments: Segments | Sequence[str] = "blocks"
    replicas: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(isinstance(self.replicas, int) and self.replicas >= 1, self, "replicas", "must be at least 1")

    def rounds_of(self, size: int, segment_count: int) -> list[Topology]:
        return [RandomPull(size, self.seed, max(segment_count, 1), self.replicas)]
