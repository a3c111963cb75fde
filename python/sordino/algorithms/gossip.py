"""Gossip: workers train on their own gradients and mix their parameters with a few others', never with all at once.

Most of the classes differ in their topology alone: who mixes with whom, a function of round, segment and rank that
every worker computes by itself. Each says in `rounds_of` which mixings one exchange is made of. ElasticAveraging has
none: its workers meet at a centre.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from sordino._core import (
    Dissemination,
    Exponential,
    Grouped,
    RandomCycle,
    RandomPull,
    Ring,
    Roulette,
    Star,
    Topology,
)
from sordino.errors import UsageError

Segments = str | int | tuple[str, ...]
Buffers = Literal["local", "average"]


def require(condition: bool, owner: object, field: str, must: str) -> None:
    """UsageError unless the condition holds, naming the owner's field and its value."""
    if not condition:
        raise UsageError(f"{type(owner).__name__}({field}={getattr(owner, field)!r}): {must}")


@dataclass(frozen=True)
class _Gossip:
    """What all gossip algorithms are told.

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

    @property
    def workers_in_group(self) -> int:
        """Neighbouring ranks that train as one worker."""
        return 1

    @property
    def leaders_only(self) -> bool:
        """Whether only the first rank of a group steps its optimizer."""
        return False


@dataclass(frozen=True)
class _Mixing(_Gossip):
    """Gossip in which workers mix with some peers, segment by segment.

    Attributes:
        segments: what is mixed as one: "model"; "blocks" (a model's top-level modules, and the members of its numbered
            containers: residual blocks and the classifier); a number of bytes; or patterns of parameter names
            (fnmatch), a segment each, the parameters that match none being one more.
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

    def rounds_of(self, size: int, segment_count: int) -> list[Topology]:
        """The mixings of one exchange among `size` ranks, one after the other.

        Raises:
            UsageError: the algorithm cannot serve so many workers.
        """
        raise UsageError(f"{type(self).__name__} has no topology")


@dataclass(frozen=True)
class _RandomMixing(_Mixing):
    """Mixing with peers that are drawn.

    Attributes:
        seed: of the draws; the same on all ranks.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(isinstance(self.seed, int) and 0 <= self.seed < 1 << 64, self, "seed", "must be from 0 to 2^64 - 1")


@dataclass(frozen=True)
class Crossover(_RandomMixing):
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
        require(isinstance(self.group_size, int) and self.group_size >= 1, self, "group_size", "must be at least 1")
        require(self.within in ("allreduce", "leader"), self, "within", "must be 'allreduce' or 'leader'")
        require(self.segment_bytes >= 1, self, "segment_bytes", "must be at least 1")
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
class DPSGD(_Mixing):
    """D-PSGD: after its own step each worker takes the mean of its parameters and both neighbours' on a ring.

    w_i = (w_{i-1} + w_i + w_{i+1}) / 3, for two workers / 2: a symmetric, doubly stochastic mixing.

    Sent per exchange and worker: twice the bytes of the parameters (once for two workers), two messages a segment.
    Staleness: none. Memory: the parameters of neighbours on other nodes. When a peer dies: as Crossover.
    Source: Lian et al. 2017, Algorithm 1 (mixing after the local step instead of beside it).
    """

    def rounds_of(self, size: int, segment_count: int) -> list[Topology]:
        return [Ring(size)]


@dataclass(frozen=True)
class GossipGraD(_RandomMixing):
    """GossipGraD: after its own step each worker averages with the rank 2^(t mod log2 N) places before it, under a
    permutation drawn anew every ceil(log2 N) rounds; within those rounds every worker's values reach all others.

    Sent per exchange and worker: the bytes of the parameters, one message a segment. Staleness: none. Memory: the
    parameters of one peer where that lives on another node. When a peer dies: as Crossover.
    Source: Daily et al. 2018, sections 4.3 and 4.5.
    """

    def rounds_of(self, size: int, segment_count: int) -> list[Topology]:
        return [Dissemination(size, self.seed)]


@dataclass(frozen=True)
class SegmentedGossip(_RandomMixing):
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
        require(isinstance(self.replicas, int) and self.replicas >= 1, self, "replicas", "must be at least 1")

    def rounds_of(self, size: int, segment_count: int) -> list[Topology]:
        return [RandomPull(size, self.seed, max(segment_count, 1), self.replicas)]


@dataclass(frozen=True)
class PushSum(_Mixing):
    """SGP, stochastic gradient push: after its own step each worker sends a share of its parameters to peers along the
    directed exponential graph, keeps a share, and adds up what arrives. Push-sum weights tell how much each has got.

    With k peers, x_i = (x_i + sum of x_j) / (k + 1) over those j that send to i, and so the weights, sent along as
    float64; the model computes with x_i / weight_i. In round t worker i sends to i + 2^(tk), ..., i + 2^(tk + k - 1)
    modulo N (exponents modulo ceil(log2 N)). The sums over the workers and what is under way stay the same.

    With `overlap` = tau > 0 an exchange runs beside the next tau steps, and what it brought is added after exactly tau
    exchanges, however early it came; a worker waits for peers that are further behind than that.
    `optimizer.flush()` adds what is under way at once. A state that is loaded begins with nothing under way.

    Sent per exchange and worker: k times the bytes of the parameters and 8 a segment, k messages a segment. Staleness:
    tau exchanges. Memory: the parameters of k peers on other nodes; with overlap tau + 1 times the parameters besides.
    When a peer dies: as Crossover. Source: Assran et al. 2019, Algorithms 1 and 2.

    Attributes:
        peers: how many, from 1 to ceil(log2 N); or from which exchange on how many, such as {0: 1, 5000: 2}.
        overlap: exchanges that a message may take, tau; 0 waits for it.
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

    @property
    def stages(self) -> dict[int, int]:
        """From which exchange on there are how many peers."""
        return dict(self.peers) if isinstance(self.peers, Mapping) else {0: self.peers}

    def rounds_of(self, size: int, segment_count: int) -> list[Topology]:
        return [Exponential(size, self.stages)]


@dataclass(frozen=True)
class ElasticAveraging(_Gossip):
    """EASGD, elastic averaging: every `interval` steps each worker is drawn towards a centre, and the centre towards
    the workers' mean.

    With alpha = moving_rate / N: w_i = w_i - alpha (w_i - c) and c = c + alpha * sum over j of (w_j - c), both from the
    values before. Every worker has the centre, and all have the same, so nobody serves it; it begins as the mean of the
    workers' parameters before the first step, and is kept in `state_dict()`.

    Sent per exchange and worker: 2(N - 1)/N times the bytes of the parameters (an all-reduce). Staleness: none. Memory:
    twice the parameters. When a peer dies: every survivor gets `PeerLost` and keeps its parameters of before.
    Source: Zhang, Choromanska and LeCun 2015, Algorithm 1 (synchronous), beta = moving_rate.

    Attributes:
        moving_rate: how far the centre moves towards the mean, above 0 and up to 1; the source's beta.
    """

    moving_rate: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.moving_rate <= 1, self, "moving_rate", "must be above 0 and at most 1")
