"""Crossover-SGD: gossip by segments with load-balanced random peers.

A random cycle through all workers, drawn again for every round and segment, determines the peers. `rounds_of` returns
these cycles, `sordino.algorithms.gossip` takes the steps, and the core sends and averages.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from sordino._core import Grouped, RandomCycle, Roulette, Star, Topology
from sordino.algorithms.base import Algorithm, Simulation, Traits, group_size_among
from sordino.algorithms.checks import NO_BUFFERS, require
from sordino.algorithms.gossip import RandomGossip
from sordino.codecs import Int8
from sordino.errors import UsageError
from sordino.runtime.exchange.segments import Segments


@dataclass(frozen=True)
class Crossover(RandomGossip):
    """Crossover-SGD: after its own step each worker averages every segment with one random peer's.

    The peers of different segments are drawn independently. Every worker sends and receives one copy of each segment.

    w_i[s] = (w_i[s] + w_j[s]) / 2, with j drawn for (seed, round, s) from a random cycle through all workers. So every
    pair is equally likely, and the sum over the workers stays the same. With `group_size` = K, neighboring ranks form
    groups that average their gradients (all-reduce in backward) and exchange as one worker. K = N equals AllReduce,
    K = 1 plain Crossover.

    Sent per exchange and worker: the bytes of the parameters, one message per segment (none within a node); in groups
    of K, the leader sends them once to every node of the receiving group, and each member sends 2(K-1)/K times the
    gradients per step inside the group. With `compression`: encoded, in one message to each peer, also within a node.
    Staleness: none. Memory: the parameters of one peer if it is on another node. A checkpoint contains the numbers of
    steps and exchanges, and with `compression` the estimated distances. When a peer dies: every remaining rank gets
    `PeerLost`; each element of its parameters has the value before or after the exchange. With on_peer_lost="continue"
    the remaining ranks undo the exchange, take the mean of their models and continue, in groups of the largest size
    that divides their number (`fitted`). Source: Yeo et al., Crossover-SGD, section 3, Algorithms 1 and 2, section 3.3.
    The topology differs: Algorithm 2 takes O(N^2) and can reach a dead end; this one takes O(1) and cannot.

    Attributes:
        group_size: ranks in a group; must divide the number of workers.
        within: "allreduce": every member of a group applies the average gradient; "leader": only its first rank does,
            and sends the parameters to the other members after the exchange. With interval=1 the parameters are the
            same; with a longer one, the others compute gradients with those of the last exchange. Not with optimizers
            that may evaluate a closure several times, such as LBFGS.
        roulette: weights[i][j] for worker (or group) i sending to j, or None for equal weights. A matrix that is not
            doubly stochastic is scaled to the nearest one that is. Up to 128 workers. When ranks are lost, the others
            keep their weights; with groups, if a rank has joined, or if a worker would have no peer, weights become
            equal, after a warning.
        bucket_bytes: gradients are reduced within groups in buckets of up to this many bytes.
    """

    segments: Segments | Sequence[str] = "blocks"
    group_size: int = 1
    within: Literal["allreduce", "leader"] = "allreduce"
    roulette: Sequence[Sequence[float]] | None = None
    bucket_bytes: int = 16 * 1024 * 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.group_size >= 1, self, "group_size", "must be at least 1")
        require(self.within in ("allreduce", "leader"), self, "within", "must be 'allreduce' or 'leader'")
        require(self.bucket_bytes >= 1, self, "bucket_bytes", "must be at least 1")
        if self.roulette is not None:
            try:
                weights = tuple(tuple(float(weight) for weight in row) for row in self.roulette)
            except (TypeError, ValueError):
                weights = ()
            fine = len(weights) > 0 and all(len(row) == len(weights) for row in weights)
            require(fine, self, "roulette", "must be None or a square matrix of weights, such as [[0, 1], [1, 0]]")
            object.__setattr__(self, "roulette", weights)

    simulation = Simulation(
        arrays="mixing",
        imitated=frozenset({"interval", "segments", "seed", "group_size", "within", "roulette", "bucket_bytes"}),
        refused={"buffers": NO_BUFFERS},
    )

    @property
    def traits(self) -> Traits:
        return replace(super().traits, bucket_bytes=self.bucket_bytes)

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

    def fitted(self, before: Sequence[int], now: Sequence[int]) -> Crossover:
        group_size = group_size_among(self.group_size, len(now))
        roulette = None
        if self.roulette is not None:
            roulette = _among(self.roulette, before, now) if self.group_size == 1 else None
            if roulette is None:
                warnings.warn(
                    f"Crossover(roulette=...): the weights for ranks {[*before]} do not fit ranks {[*now]} (numbered "
                    "as at the start), so all peers are equally likely from now on",
                    stacklevel=2,
                )
        return replace(self, group_size=group_size, roulette=roulette)

    @classmethod
    def candidates(cls, nodes: Sequence[int], interval: int) -> list[Algorithm]:
        size = len(nodes)
        groups = [members for members in range(2, size) if size % members == 0]
        return [cls(), cls(compression=Int8()), *(cls(group_size=members) for members in groups)]


def _among(
    weights: Sequence[Sequence[float]], before: Sequence[int], now: Sequence[int]
) -> tuple[tuple[float, ...], ...] | None:
    """Return the weights among the present workers; None (equal weights) if some are new or would have no peer."""
    if not set(now) <= set(before):  # ranks have joined, for which there are no weights
        return None
    places = [before.index(one) for one in now]
    part = tuple(tuple(float(weights[i][j]) for j in places) for i in places)
    met = all(any(row[:i] + row[i + 1 :]) for i, row in enumerate(part))
    return part if met and all(any(column[:j] + column[j + 1 :]) for j, column in enumerate(zip(*part))) else None
