"""DiLoCo: workers train alone for many steps, and an outer optimizer steps the common model by their mean change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sordino.algorithms.base import Algorithm, Simulation, Traits, group_size_among, made
from sordino.algorithms.checks import NO_BUFFERS, require
from sordino.algorithms.gossip import Gossip
from sordino.algorithms.traffic import (
    Copies,
    Model,
    Operation,
    Phase,
    Sent,
    Traffic,
    gradients,
    groups_of,
    mean_within,
)
from sordino.codecs import Codec, FlatCodec, Int4, flat_codec_of
from sordino.errors import UsageError
from sordino.runtime.exchange.segments import Segments

if TYPE_CHECKING:
    from sordino.algorithms.gossip.mixing import Mixing, Peers
    from sordino.runtime.exchange.flat_buffer import ParameterBuffer

_LONG, _MEDIUM = 256, 64  # the default momentum is 0.9 for intervals from _LONG, 0.5 for intervals above _MEDIUM


def fragment_of(segment: int, fragments: int) -> int:
    """Return the fragment of a segment. Neighboring segments are in different fragments."""
    return segment % fragments


@dataclass(frozen=True)
class DiLoCo(Gossip):
    """DiLoCo: workers train alone, and every `interval` steps an outer optimizer steps the model that all share.

    The shared model is called the outer parameters. The gradient of the outer step is the mean change of the workers.

    With outer parameters θ, momentum b (at first 0), outer learning rate η and momentum factor μ, every `interval`
    steps: Δ = mean over workers of (w_i - θ), b = μ b + Δ, and θ = θ + η (Δ + μ b), or θ + η b without `nesterov`. Then
    all workers continue from w_i = θ. Δ is a descent direction, the negative of a gradient. The inner optimizer keeps
    its state. η = 1 and μ = 0 are local SGD.

    With F > 1 `fragments` (streaming DiLoCo) the model is divided into F fragments: its blocks in turn, as in
    `Crossover(segments="blocks")`. Every interval / F steps the next fragment takes its outer step, so each does every
    `interval` steps, and a worker sends 1/F at a time. With `group_size` K, the K ranks of a group of neighbors are one
    worker: they average their gradients in every step.

    With `overlap` τ > 0 the all-reduce of a fragment runs in the background while the workers take τ more steps. Then
    θ takes the outer step with the mean change from before these steps, and w_i = mix w_i + (1 - mix) θ. So a share of
    the steps taken meanwhile remains. The next change of a worker counts from θ.

    Between outer steps the parameters are a worker's own. Evaluate and save the outer parameters, which
    `optimizer.outer_parameters()` puts into the model. They start as the first rank's parameters, and are part of
    `state_dict()`, with the momentum. An all-reduce in flight does not count for `outer_parameters()`, but its result
    is part of `state_dict()`, which waits for it. `flush()` applies it at once: call it at the end of training.
    Parameters that are unfrozen or added during an interval start from the first rank's values. Those that are frozen
    by then become their mean over all workers. All others keep their values, outer parameters and momentum. With
    fragments, a block may then belong to another fragment, so one of its intervals is longer or shorter.

    Buffers given as `named_buffers` are averaged with buffers="average" at the exchange of the last fragment. All
    ranks wait for each other there, also with overlap.

    Sent per exchange and worker: 2(N - 1)/N times the bytes of a fragment (an all-reduce; in float32 for 16-bit
    parameters). Staleness: none, or τ steps with `overlap`; workers drift apart for `interval` steps. Memory: four
    times the parameters (outer parameters, momentum, and the changes that are averaged; in float32 for 16-bit
    parameters). When a peer dies: every remaining rank gets `PeerLost`, at the latest where the outer step would be
    taken, and keeps its parameters and outer parameters; if ranks continue, an all-reduce in flight is given up, the
    mean of their models becomes θ, and b becomes 0. Source: Douillard et al. 2023, Algorithm 1; fragments, overlap and
    mix: Douillard et al. 2025 (streaming DiLoCo), sections 2.2 and 2.3.

    Attributes:
        interval: optimizer steps from one outer step of a fragment to the next, H; a multiple of `fragments`.
        outer_lr: outer learning rate, η. None: 0.7, or 1 if the momentum is 0.
        outer_momentum: momentum factor, μ, from 0 to below 1. None: 0.9 for an interval from 256 steps, 0.5 above 64
            steps, else 0, because momentum was found to do harm with short intervals.
        nesterov: whether the momentum is Nesterov's.
        fragments: number of fragments, F.
        group_size: ranks that are one worker, K; must divide the number of ranks.
        overlap: steps that workers take while a fragment is averaged, τ; below interval / fragments. 0: they wait.
        mix: share of its own parameters that a worker keeps at an outer step, from 0 to below 1. None: 0.5 with
            overlap, 0 without.
        compression: codec of the outer gradients, such as `Int4()`, or its name; None: they are sent in float32. With
            overlap, half of the communication of an encoded mean is in the background, with `TopK` all of it, and
            `state_dict()` has what this rank has sent instead of the result, so it does not wait. It also has what the
            encodings of this rank have lost so far (docs/compression.md).
    """

    interval: int = 256
    outer_lr: float | None = None
    outer_momentum: float | None = None
    nesterov: bool = True
    fragments: int = 1
    group_size: int = 1
    overlap: int = 0
    mix: float | None = None
    compression: Codec | str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.outer_lr is None or self.outer_lr > 0, self, "outer_lr", "must be above 0")
        fine = self.outer_momentum is None or 0 <= self.outer_momentum < 1
        require(fine, self, "outer_momentum", "must be at least 0 and below 1")
        require(self.fragments >= 1, self, "fragments", "must be at least 1")
        require(self.interval % self.fragments == 0, self, "fragments", f"must divide interval={self.interval}")
        require(self.group_size >= 1, self, "group_size", "must be at least 1")
        require(self.overlap >= 0, self, "overlap", "must be at least 0")
        limit = f"must be below interval / fragments, here {self.every}, so that one exchange ends before the next"
        require(self.overlap < self.every, self, "overlap", limit)
        require(self.mix is None or 0 <= self.mix < 1, self, "mix", "must be at least 0 and below 1")
        object.__setattr__(self, "compression", flat_codec_of(self.compression, f"{self.label}(compression"))

    always_written = ("interval",)
    steps = "sordino.algorithms.diloco.strategy:DiLoCoStrategy"
    # These keys are missing before the first step.
    optional_state = frozenset({"parameters", "outer", "momentum", "pending", "pending_averaged", "residuals"})
    simulation = Simulation(
        arrays="outer",
        imitated=frozenset(
            {"interval", "outer_lr", "outer_momentum", "nesterov", "fragments", "group_size", "overlap", "mix"}
        ),
        refused={"buffers": NO_BUFFERS},
    )

    @property
    def traits(self) -> Traits:
        reason = "its checkpoints contain the whole outer parameters"
        return replace(super().traits, late=self.overlap > 0, whole_parameters=reason)

    @property
    def rate(self) -> float:
        """The outer learning rate, η."""
        if self.outer_lr is not None:
            return self.outer_lr
        return 0.7 if self.momentum > 0 else 1.0

    @property
    def momentum(self) -> float:
        """The momentum factor, μ."""
        if self.outer_momentum is not None:
            return self.outer_momentum
        return 0.9 if self.interval >= _LONG else 0.5 if self.interval > _MEDIUM else 0.0

    @property
    def averages_models(self) -> bool:
        """Whether the outer step equals the mean of the models. Then models are averaged, not changes, to be exact."""
        return self.compression is None and self.rate == 1 and self.momentum == 0

    @property
    def codec(self) -> FlatCodec | None:
        """The codec of the outer gradients; None: they are sent in float32."""
        return flat_codec_of(self.compression, "compression")

    @property
    def kept(self) -> float:
        """The factor by which residuals decay in an exchange."""
        return 1.0

    @property
    def own_share(self) -> float:
        """The share of its own parameters that a worker keeps at an outer step."""
        if self.mix is not None:
            return self.mix
        return 0.5 if self.overlap > 0 else 0.0

    @property
    def every(self) -> int:
        return self.interval // self.fragments

    @property
    def workers_in_group(self) -> int:
        return self.group_size

    @property
    def cut(self) -> Segments | Sequence[str]:
        return "blocks" if self.fragments > 1 else "model"

    def mixing(self, peers: Peers, values: ParameterBuffer) -> Mixing:
        self.check_groups(len(peers.process_set.ranks or []))
        mixing: Mixing = made("sordino.algorithms.diloco.outer:OuterStep", peers, values, self)
        return mixing

    def traffic(self, model: Model, nodes: Sequence[int]) -> Traffic:
        size, members = len(nodes), self.group_size
        self.check_groups(size)
        segments, all_workers = model.segments(self.cut), groups_of(size, size)
        self.check_fragments(len(segments))
        sizes = [sum(segments[fragment :: self.fragments]) for fragment in range(self.fragments)]

        def outer_step(round: int, _: Sent | None) -> list[Operation]:
            size = sizes[round % self.fragments]
            # Reads and writes: 3 for the change, 2 for the copy that is averaged, 5 for θ and b, 2 for the parameters.
            return [*mean_within(all_workers, size, self.codec), Copies(12 * size)]

        late = self.overlap > 0
        phases = [Phase(outer_step, self.every, hides=float(late), step=late, overlap=self.overlap)]
        if members > 1:
            phases.insert(0, gradients(groups_of(size, members), model, self.traits.bucket_bytes))
        return Traffic(phases)

    def check_groups(self, size: int) -> None:
        """Raise UsageError for a number of ranks that groups do not divide."""
        if size % self.group_size:
            what = f"{self.label}(group_size={self.group_size})"
            raise UsageError(f"{what}: does not divide {size} ranks into equal groups")

    def check_fragments(self, blocks: int) -> None:
        """Raise UsageError for a model with fewer blocks than fragments."""
        if blocks < self.fragments:
            raise UsageError(
                f"DiLoCo(fragments={self.fragments}): the model has only {blocks} block{'s' * (blocks != 1)}; use at "
                "most as many fragments"
            )

    def fitted(self, before: Sequence[int], now: Sequence[int]) -> DiLoCo:
        return replace(self, group_size=group_size_among(self.group_size, len(now)))

    @classmethod
    def candidates(cls, nodes: Sequence[int], interval: int) -> list[Algorithm]:
        proposed = cls(interval)
        # Without momentum it is local SGD.
        return [proposed, cls(interval, compression=Int4())] if proposed.momentum > 0 else []
