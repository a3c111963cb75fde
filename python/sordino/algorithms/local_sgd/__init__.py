"""Hierarchical local SGD: groups of workers train one local model each, and the models are averaged periodically."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from sordino.algorithms.base import Algorithm, Simulation, Traits, group_size_among
from sordino.algorithms.checks import NO_BUFFERS, Buffers, check_kinds, is_count, require
from sordino.algorithms.traffic import (
    Copies,
    Model,
    Operation,
    Phase,
    Reduction,
    Sets,
    Traffic,
    from_owners,
    gradients,
    groups_of,
    hidden,
    mean_within,
    to_owners,
)
from sordino.codecs import Codec, FlatCodec, Int4, TopK, flat_codec_of
from sordino.errors import UsageError

if TYPE_CHECKING:
    from sordino.runtime.gradients.options import Options


@dataclass(frozen=True)
class AdaptiveInterval:
    """AdaComm: the interval starts at `LocalSGD.interval`, and falls with the loss.

    F is the loss given to `optimizer.report_metric`, and lr the learning rate of the first parameter group. After each
    block, interval = ceil(interval_0 * sqrt(lr_0 F / (lr F_0))). If that is not less than the last interval, it becomes
    half of the last one (at least 1). Source: Wang and Joshi 2018, equations 18 to 20.

    Attributes:
        block: steps between two evaluations of the interval.
    """

    block: int

    def __post_init__(self) -> None:
        check_kinds(type(self), vars(self))
        require(self.block >= 1, self, "block", "must be at least 1")


@dataclass(frozen=True)
class LocalSGD(Algorithm):
    """Hierarchical local SGD: every group of K neighboring ranks trains a local model, and models are averaged.

    A group trains on the gradients of its members. Every `interval` steps the P = N / K local models are replaced by
    their mean.

    With exchange="sharded" (K > 1) each rank owns 1/K of the parameters. It averages the group's gradients of its part
    (all-to-all), steps the optimizer on that part alone, averages it with the peers in other groups (all-reduce) and
    sends it to its group (all-gather). The optimizer must be element-wise (see `elementwise`), and holds 1/K of the
    state. With exchange="allreduce" every rank all-reduces gradients within the group and whole models across groups;
    the parameters are the same. P = 1 equals AllReduce.

    With overlap=True `step()` does not wait for the all-gather. Any thread that uses a parameter waits for its bucket.
    A module that is called waits for its own parameters only, so the parameters of later layers arrive during the
    forward pass of earlier ones. Access to gradients, shapes or devices does not wait. If a view of a parameter exists
    (`detach()`, `numpy()`), `step()` waits for that parameter. Access to memory by its address alone (`data_ptr()`) is
    not noticed: call `optimizer.flush()` before it. Parameters are the same, bit for bit.

    With `compression` the averaging sends encoded changes of the models since the last averaging, as `DiLoCo`
    does with outer_lr=1 and outer_momentum=0: with the outer parameters θ, θ = θ + mean of (w_i - θ), then w_i = θ on
    all ranks, bit for bit. At first θ are the first group's parameters. Afterwards they are part of `state_dict()`, by
    the names of parameters, and so is what the encodings of this rank have lost so far. All ranks load a state
    together, between the same steps; if only some of them have done so, the ranks that average with them raise
    `UsageError`. Gradients within a group, and the all-gather of shards, are not encoded.

    Sent per step and worker, for a model of M bytes: with exchange="sharded" 2(K-1)/K M inside the group, and every
    `interval` steps 2(P-1)/P M/K across; allreduce 2(P-1)/P M across; with `compression` the encoded bytes across.
    Staleness: none; models of different groups drift apart for `interval` steps. Memory: sharded the gradients once
    more at most, and 1/K of the optimizer's state; with `compression` up to six times the averaged parameters in
    float32. When a peer dies: every remaining rank gets `PeerLost`, with overlap=True at its first use of a parameter.
    Source: Lee et al., "Communication-efficient local SGD with hierarchical parallelism", sections III-A and III-B;
    "post-local SGD" (Lin et al. 2018) for `start`; SASGD (Cong et al. 2017) for aggregate="gradients".

    Attributes:
        interval: steps from one averaging across groups to the next.
        group_size: K; must divide the number of workers.
        exchange: "sharded": each rank of a group owns 1/K of the parameters; "allreduce": each holds all. See above.
        start: the step from which on groups train separately: "immediate", a number of steps, or "decay": when the
            first parameter group's learning rate has fallen. Before that step, every step averages gradients over all
            workers.
        aggregate: "parameters" takes the mean of the local models; "gradients" adds up their changes since the last
            averaging: w = w_then + sum over groups of (w_i - w_then). w_then is part of `state_dict()`.
        adaptive: the rule by which the interval changes, or None.
        buffers: "average" takes the mean over all workers of the floating-point buffers given as `named_buffers`
            whenever models are averaged, "local" does not exchange them.
        log_distance: steps between two entries in `optimizer.distances`, the distance D of the local models from their
            mean; None for no entries. An entry costs as much as an averaging.
        bucket_bytes: gradients are reduced in buckets of up to this many bytes.
        elementwise: declares for exchange="sharded" that an optimizer not known to be element-wise (your own, or one
            derived from another) is element-wise. The first step that changes something is tried on copies, whole and
            in slices; `UsageError` if they differ. The trial takes the memory of the model and its whole state once.
        overlap: whether `step()` returns without waiting for the all-gather of exchange="sharded". See above.
        compression: codec of the changes that are averaged across groups, such as `Int8()`, or its name; None: models
            are averaged, in their own dtype. With aggregate="gradients" not `TopK(contributors=True)`. See above.
    """

    interval: int = 8
    group_size: int = 1
    exchange: Literal["sharded", "allreduce"] = "sharded"
    start: int | Literal["immediate", "decay"] = "immediate"
    aggregate: Literal["parameters", "gradients"] = "parameters"
    adaptive: AdaptiveInterval | None = None
    buffers: Buffers = "local"
    log_distance: int | None = None
    bucket_bytes: int = 16 * 1024 * 1024
    elementwise: bool = False
    overlap: bool = False
    compression: Codec | str | None = None

    def __post_init__(self) -> None:
        counts = ["interval", "group_size", "bucket_bytes"] + ["log_distance"] * (self.log_distance is not None)
        for name in counts:
            require(getattr(self, name) >= 1, self, name, "must be at least 1")
        require(self.exchange in ("sharded", "allreduce"), self, "exchange", "must be 'sharded' or 'allreduce'")
        timed = is_count(self.start, 0)
        require(timed or self.start in ("immediate", "decay"), self, "start", "must be 'immediate', 'decay' or a step")
        fine = self.aggregate in ("parameters", "gradients")
        require(fine, self, "aggregate", "must be 'parameters' or 'gradients'")
        fine = self.adaptive is None or isinstance(self.adaptive, AdaptiveInterval)
        require(fine, self, "adaptive", "must be an AdaptiveInterval or None")
        require(self.buffers in ("local", "average"), self, "buffers", "must be 'local' or 'average'")
        for name in ("elementwise", "overlap"):
            fine = not getattr(self, name) or self.exchange == "sharded"
            require(fine, self, name, "has an effect only with exchange='sharded'")
        codec = flat_codec_of(self.compression, "LocalSGD(compression")
        object.__setattr__(self, "compression", codec)
        counted = self.aggregate == "gradients" and isinstance(codec, TopK) and codec.contributors
        limit = "must have contributors=False with aggregate='gradients', because a sum is that of all groups"
        require(not counted, self, "compression", limit)

    always_written = ("interval", "group_size")
    parts: ClassVar = {"adaptive": AdaptiveInterval}
    steps = "sordino.algorithms.local_sgd.strategy:LocalSGDStrategy"
    simulation = Simulation(
        arrays="local",
        imitated=frozenset({"interval", "group_size", "exchange", "start", "aggregate", "bucket_bytes", "overlap"}),
        refused={
            "adaptive": "the interval would follow losses, which a simulation does not report; give interval=...",
            "buffers": NO_BUFFERS,
            "elementwise": "the optimizer of a simulation is SGD, which is known to be element-wise",
            "log_distance": "the learning curve shows the distance already",
        },
    )

    @property
    def traits(self) -> Traits:
        return Traits(
            averages_buffers=self.buffers == "average",
            sends_gradients=self.group_size > 1,
            bucket_bytes=self.bucket_bytes,
            ends_with='LocalSGD(exchange="sharded")' if self.sharded else None,
            whole_parameters=self._why_whole(),
        )

    def _why_whole(self) -> str | None:
        """Return why a setting excludes parameters that are sharded over a device mesh; None: no setting does."""
        if self.sharded:
            return 'exchange="sharded" would shard them once more; use exchange="allreduce"'
        if self.codec is not None:
            return "with compression= its checkpoints contain the whole outer parameters; use compression=None"
        if self.adaptive is not None:
            return "ranks with different shards have different losses, so adaptive= would give them different intervals"
        if self.log_distance is not None:
            return "log_distance= would be the distance of one shard"
        return None

    @property
    def codec(self) -> FlatCodec | None:
        """The codec of the changes that are averaged across groups; None: models are averaged."""
        return flat_codec_of(self.compression, "compression")

    @property
    def workers_in_group(self) -> int:
        return self.group_size

    @property
    def sharded(self) -> bool:
        """Whether each member of a group owns a part of the parameters."""
        return self.exchange == "sharded" and self.group_size > 1

    def groups_of(self, size: int) -> int:
        """Return P, the number of local models among `size` ranks.

        Raises:
            UsageError: `group_size` does not divide `size`.
        """
        if size % self.group_size != 0:
            raise UsageError(f"LocalSGD(group_size={self.group_size}): does not divide {size} ranks into equal groups")
        return size // self.group_size

    def traffic(self, model: Model, nodes: Sequence[int]) -> Traffic:
        size, members, models = len(nodes), self.group_size, self.groups_of(len(nodes))
        groups, all_workers = groups_of(size, members), groups_of(size, size)
        alone = self.start if isinstance(self.start, int) else 0  # the first step in which groups train separately
        count = model.bytes / members if self.sharded else model.bytes
        between = [Reduction(groups.T, [count])] if models > 1 else []
        averaging = Phase(self._averages(groups.T, count) if models > 1 else [], self.interval, since=alone)
        if not self.sharded:
            together = gradients(all_workers, model, self.bucket_bytes, until=alone)
            if members == 1:
                return Traffic([together, averaging])
            return Traffic([together, gradients(groups, model, self.bucket_bytes, since=alone), averaging])
        buckets = model.buckets(self.bucket_bytes)
        shards = [[bucket / members] * members for bucket in buckets]
        inward = [to_owners(groups, one, tensors=len(model.sizes) if k == 0 else 0) for k, one in enumerate(shards)]
        return Traffic(
            [
                Phase(inward, hides=hidden(buckets)),
                Phase(between, until=alone),
                averaging,
                Phase([from_owners(groups, one) for one in shards], loading=self.overlap),
            ]
        )

    def _averages(self, peers: Sets, size: float) -> list[Operation]:
        """Return the operations of an averaging of `size` bytes of parameters."""
        averages = mean_within(peers, size, self.codec)
        # Reads and writes: 3 for the change, 2 for the copy that is encoded, 3 for θ, 2 for the parameters.
        return averages if self.codec is None else [*averages, Copies(10 * size)]

    def check(self, options: Options) -> None:
        other = options.compresses or options.groups is not None or options.gradient_predivide_factor != 1.0
        if other and self.group_size == 1 and self.start not in ("immediate", 0):
            raise UsageError(
                f"LocalSGD(start={self.start!r}) without groups sends gradients only until models train separately. "
                "For that time it does not support compression=, groups= and gradient_predivide_factor=. Omit them, or "
                "use LocalSGD(compression=...), which is for the averagings"
            )
        super().check(options)

    def check_simulation(self, workers: int) -> None:
        if self.start == "decay":
            raise UsageError("LocalSGD(start='decay') cannot be simulated: the learning rate is constant; give a step")

    def fitted(self, before: Sequence[int], now: Sequence[int]) -> LocalSGD:
        return replace(self, group_size=group_size_among(self.group_size, len(now)))

    @classmethod
    def candidates(cls, nodes: Sequence[int], interval: int) -> list[Algorithm]:
        size = len(nodes)
        groups = [members for members in range(2, size) if size % members == 0]
        found: list[Algorithm] = [cls(interval), cls(interval, compression=Int4())]
        for members in groups:
            found += [cls(interval, members, "sharded"), cls(interval, members, "allreduce")]
        return found
