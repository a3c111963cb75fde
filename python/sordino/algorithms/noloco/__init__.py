"""NoLoCo: workers train alone, then each takes an outer step with the mean change of a few random workers.

The idea of this implementation: the outer step needs two means over a group of workers, and both come from one vector.
With the outer learning rate α and the pull γ, α mean(θ - φ) + γ (mean φ - φ) equals α (mean(θ + (γ/α - 1) φ) - γ/α φ).
So a worker sends one copy of its parameters, not two. For γ = α this copy is θ itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sordino._core import Grouped, RandomGroups, Topology
from sordino.algorithms.base import Algorithm, Simulation, Traits, group_size_among, made
from sordino.algorithms.checks import NO_BUFFERS, require
from sordino.algorithms.gossip import AveragingGossip, RandomGossip
from sordino.algorithms.traffic import Copies, Model, Phase, Traffic
from sordino.codecs import Int4
from sordino.errors import UsageError

if TYPE_CHECKING:
    from sordino.algorithms.gossip.mixing import Mixing, Peers
    from sordino.runtime.exchange.flat_buffer import ParameterBuffer

_SHORTEST = 50  # interval of the source; `sordino plan` proposes no shorter one


@dataclass(frozen=True)
class NoLoCo(RandomGossip):
    """NoLoCo: every `interval` steps each worker takes an outer step with the mean change of a few random workers.

    It is DiLoCo without an all-reduce. Every worker has outer parameters of its own, which are pulled towards those of
    the workers that it meets.

    With θ the parameters of a worker after its own steps, φ its outer parameters, b its momentum (at first 0), outer
    learning rate α, momentum factor μ and pull γ, every `interval` steps: b = μ b + α mean(θ - φ) + γ (mean φ - φ),
    φ = φ + b, and θ = φ. The means are over a random group of workers, which is drawn again for every outer step and
    segment. θ - φ is a descent direction, the negative of a gradient. The inner optimizer keeps its state.

    A group has `peers` workers. If `peers` does not divide their number, the rest joins the groups as evenly as
    possible: 5 workers in pairs are a group of 3 and one of 2, so no worker is ever left out. All groups are equally
    likely. A worker waits for its own group, and for the ranks of its node. The pull γ leaves the mean of φ over all
    workers unchanged. One group of all workers with γ = 0 is DiLoCo with nesterov=False. With `group_size` K, the K
    ranks of a group of neighbors are one worker: they average their gradients in every step.

    All workers start from the first rank's parameters. `optimizer.outer_parameters()` puts φ into the model. φ differs
    between workers, so average it for an evaluation: `hvd.average_parameters(model)` within that block. φ and b are
    part of `state_dict()`, by the names of parameters; each worker needs its own.

    Sent per exchange and worker: the bytes of the parameters to each other worker of its group, in one message per
    segment; half of what the source sends, because both means are computed from one vector. One group of all workers:
    2(N - 1)/N times the bytes of the parameters (an all-reduce). With `compression`: encoded, in one message to each
    other worker. Staleness: none; workers drift apart for `interval` steps. Memory: four times the parameters (outer
    parameters, momentum and the copy that is sent; the first two in float32 for 16-bit parameters), and the parameters
    of the others of the group on other nodes. When a peer dies: every remaining rank gets `PeerLost`, before or after
    its outer step, never within it; if ranks continue, the mean of their models becomes φ, and b becomes 0.

    Source: Kolehmainen et al. 2025 (NoLoCo). The update is that of the authors' code (jkolehm/noloco,
    sparse_optimizer_c.py), which has γ = α and refuses a number of workers that `peers` does not divide.

    Attributes:
        interval: optimizer steps from one outer step to the next.
        outer_lr: outer learning rate, α.
        outer_momentum: momentum factor, μ, from 0 to below 1.
        gamma: pull towards the mean outer parameters of the group, γ, at least 0. None: `outer_lr`.
        peers: workers that average with each other, from 2 to all.
        group_size: ranks that are one worker, K; must divide the number of ranks.
    """

    interval: int = 50
    outer_lr: float = 0.7
    outer_momentum: float = 0.5
    gamma: float | None = None
    peers: int = 2
    group_size: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.outer_lr > 0, self, "outer_lr", "must be above 0")
        require(0 <= self.outer_momentum < 1, self, "outer_momentum", "must be at least 0 and below 1")
        require(self.gamma is None or self.gamma >= 0, self, "gamma", "must be at least 0, or None for outer_lr")
        require(self.peers >= 2, self, "peers", "must be at least 2")
        require(self.group_size >= 1, self, "group_size", "must be at least 1")

    always_written = ("interval",)
    steps = "sordino.algorithms.noloco.strategy:NoLoCoStrategy"
    optional_state = AveragingGossip.optional_state | {"outer", "momentum"}  # they exist from the first step on
    simulation = Simulation(
        arrays="outer-gossip",
        imitated=frozenset(
            {"interval", "segments", "seed", "outer_lr", "outer_momentum", "gamma", "peers", "group_size"}
        ),
        refused={"buffers": NO_BUFFERS},
    )

    @property
    def traits(self) -> Traits:
        return replace(super().traits, whole_parameters="its checkpoints contain the whole outer parameters")

    @property
    def pull(self) -> float:
        """The pull towards the mean outer parameters of the group, γ, in units of the outer learning rate."""
        return 1.0 if self.gamma is None else self.gamma / self.outer_lr

    @property
    def workers_in_group(self) -> int:
        return self.group_size

    def rounds_of(self, size: int, segment_count: int) -> list[Topology]:
        if size % self.group_size != 0:
            raise UsageError(f"NoLoCo(group_size={self.group_size}): does not divide {size} ranks into equal groups")
        workers = size // self.group_size
        if workers == 1:
            return []
        among = RandomGroups(workers, self.seed, self.peers)
        return [among if self.group_size == 1 else Grouped(among, self.group_size, leaders_only=False)]

    def mixing(self, peers: Peers, values: ParameterBuffer) -> Mixing:
        mixing: Mixing = made("sordino.algorithms.noloco.outer:OuterGossip", peers, values, self)
        return mixing

    def traffic(self, model: Model, nodes: Sequence[int]) -> Traffic:
        # θ to the copy, and then: the mean, φ, b and θ.
        copies = Phase([Copies(8 * model.bytes)], self.interval)
        return Traffic([*super().traffic(model, nodes).phases, copies])

    def fitted(self, before: Sequence[int], now: Sequence[int]) -> NoLoCo:
        group_size = group_size_among(self.group_size, len(now))
        return replace(self, group_size=group_size, peers=max(2, min(self.peers, len(now) // group_size)))

    @classmethod
    def candidates(cls, nodes: Sequence[int], interval: int) -> list[Algorithm]:
        serves = interval >= _SHORTEST and len(nodes) > 1
        return [cls(interval), cls(interval, compression=Int4())] if serves else []
