"""Convergence-aware parameter skipping (CaPS): tensors that have stopped changing are not sent."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from sordino.algorithms.base import Algorithm, Simulation, Traits, made
from sordino.algorithms.checks import NO_BUFFERS, Buffers, check_kinds, require
from sordino.algorithms.traffic import (
    Model,
    Operation,
    Phase,
    Reduction,
    Sent,
    Traffic,
    from_owners,
    groups_of,
    to_owners,
)
from sordino.errors import UsageError

if TYPE_CHECKING:
    from sordino.runtime.exchange.helpers import Helpers, Service

Detection = Literal["naive", "random", "history", "movement"]
_MOST_MESSAGES = 10_000_000  # per step of all workers, in a simulation


@dataclass(frozen=True)
class ThresholdScheduler:
    """Scheduler that lowers the threshold (skips more) while a metric improves, and raises it (skips less) otherwise.

    Every `frequency` epochs it compares the last `history_length` metrics, which `optimizer.report_metric` gets once
    per epoch. If each is better than the one before, the threshold falls by `step`; otherwise it rises by `step`. With
    fewer metrics it stays. A NaN is no improvement. Source: CaPS, section 3.2.

    Attributes:
        history_length: number of metrics that are compared; the source uses 3 to 10.
        frequency: epochs between two comparisons.
        step: change of the threshold, in percentage points.
        lower, upper: bounds of the threshold, in percent.
        mode: "min" if smaller metrics are better (a loss), "max" if larger ones are (an accuracy).
        improving: action while the metric improves: "lower" the threshold, or "keep" it.
    """

    history_length: int = 3
    frequency: int = 5
    step: float = 1.0
    lower: float = 1.0
    upper: float = 100.0
    mode: Literal["min", "max"] = "min"
    improving: Literal["lower", "keep"] = "lower"

    def __post_init__(self) -> None:
        check_kinds(type(self), vars(self))
        require(self.history_length >= 2, self, "history_length", "must be at least 2, to show a trend")
        require(self.frequency >= 1, self, "frequency", "must be at least 1")
        require(self.step > 0, self, "step", "must be above 0")
        require(self.lower >= 0, self, "lower", "must be at least 0")
        require(self.upper >= self.lower, self, "upper", f"must be at least lower={self.lower}")
        require(self.mode in ("min", "max"), self, "mode", "must be 'min' or 'max'")
        require(self.improving in ("lower", "keep"), self, "improving", "must be 'lower' or 'keep'")

    def improves(self, metrics: Sequence[float]) -> bool:
        """Return whether each metric is better than the one before it."""
        if self.mode == "min":
            return all(late < early for early, late in pairwise(metrics))
        return all(late > early for early, late in pairwise(metrics))

    def threshold_after(self, epochs: int, threshold: float, metrics: Sequence[float]) -> float:
        """Return the threshold for the next epoch, in percent.

        Args:
            epochs: number of epochs that have ended.
            threshold: the current threshold, in percent.
            metrics: metrics of the last epochs, oldest first.
        """
        recent = metrics[-self.history_length :]
        if epochs % self.frequency != 0 or len(recent) < self.history_length:
            return threshold
        if not self.improves(recent):
            return min(threshold + self.step, self.upper)
        return threshold if self.improving == "keep" else max(threshold - self.step, self.lower)


class ServerRoles(NamedTuple):
    """Division of ranks into workers, which train, and helpers, which have no model and serve parameters."""

    workers: list[int]
    helpers: list[int]


@dataclass(frozen=True)
class CaPS(Algorithm):
    """CaPS: workers step on their own gradients, then average those of their parameters that have changed.

    After each step every worker measures, for each tensor, the fraction of elements that the step has left unchanged.
    If this is at least `threshold` percent on *all* workers, the tensor is not sent, and each worker keeps training its
    own copy. After `probe_interval` steps without it a tensor is sent in any case (a probe), so copies cannot drift
    apart for long. If a tensor changes again on any worker, it is sent in the same step ("movement": when its average
    shows the change, or at its probe).

    With nothing skipped (a threshold above 100) this equals `LocalSGD(interval=1, exchange="allreduce")`. With
    everything skipped (0) it equals that with `interval=probe_interval + 1`. Both hold bit for bit (with servers,
    within rounding). At 100 the naive detector, without `digits`, skips a tensor only if no worker has changed any
    element, so nothing is lost: sparse updates cost only what they change, block by block with granularity="block".
    Samples and rounding can miss changes.

    Sent per step and worker, of S bytes that are not skipped: 2(N-1)/N S by all-reduce; the same with a parameter
    server on every worker; S to and from dedicated servers, or to and from `servers=k` of the workers, each of which
    sends (N-1)/k S more; in addition one byte for each tensor or block. Staleness: none for sent tensors,
    `probe_interval` steps for skipped ones. Memory: the parameters once more (naive, history; 1 byte per element more
    for the latter), or two samples (random); a server holds its share of the parameters of all workers on other nodes.
    When a peer dies: every remaining rank gets `PeerLost`. Source: Jeong, "CaPS-Learning", sections 3.1 and 3.2.

    Attributes:
        detector: "naive" compares all elements; "random" a sample of `sample_ratio`, drawn again in each step;
            "history" the `sample_ratio` that have changed most often, so it finds fewer unchanged elements than exist;
            "movement" skips the tensors that move least: elements count as unchanged if, on average, the elements of
            their tensor move less than those of other tensors.
        threshold: percentage of unchanged elements from which on a tensor is skipped. For "movement", the percentage of
            all elements that must move further than a tensor's, so that about as many are sent in every step.
        digits: elements count as unchanged if they are equal when rounded to this number of decimals; None: if no bit
            has changed.
        sample_ratio: the part of each tensor that "random" and "history" compare, in (0, 1].
        survey_interval: steps between two comparisons of all elements by "history".
        memory: weight of the previous average of movement in the next one, for "movement", in [0, 1).
        probe_interval: largest number of steps in a row without a tensor.
        scheduler: rule by which the threshold follows `optimizer.report_metric`; None: the threshold stays.
        exchange: "allreduce", or "parameter-server": each tensor is sent to a server, which averages it and sends it
            back. Tensors are placed by size (longest first, large ones cut), again when the set of skipped tensors
            changes.
        servers: number of ranks that serve, evenly spread; None: all workers.
        dedicated_servers: whether servers are the last ranks of the job, without a model. Needs `init(algorithm=...)`.
        granularity: "tensor", or "block": tensors are cut into blocks of `block_bytes`, each skipped separately, so
            that parts of large tensors can be skipped, too.
        block_bytes: size of a block for granularity="block", in bytes; a multiple of 64.
        buffers: "average" treats floating-point buffers given as `named_buffers` like parameters.
        statistics_interval: steps that one point of `optimizer.statistics` sums up.
        seed: seed of random samples; the same on all workers.
    """

    detector: Detection = "naive"
    threshold: float = 10.0
    digits: int | None = None
    sample_ratio: float = 0.01
    survey_interval: int = 20
    memory: float = 0.9
    probe_interval: int = 4
    scheduler: ThresholdScheduler | None = None
    exchange: Literal["allreduce", "parameter-server"] = "allreduce"
    servers: int | None = None
    dedicated_servers: bool = False
    granularity: Literal["tensor", "block"] = "tensor"
    block_bytes: int = 64 * 1024
    buffers: Buffers = "local"
    statistics_interval: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        fine = self.detector in ("naive", "random", "history", "movement")
        require(fine, self, "detector", "must be 'naive', 'random', 'history' or 'movement'")
        require(self.threshold >= 0, self, "threshold", "must be at least 0 (percent)")
        fine = self.digits is None or 0 <= self.digits <= 15
        require(fine, self, "digits", "must be from 0 to 15, or None for exact comparison")
        fine = self.digits is None or self.detector != "movement"
        require(fine, self, "digits", "has no effect with detector='movement', which compares no elements")
        require(0 <= self.memory < 1, self, "memory", "must be at least 0 and below 1")
        require(0 < self.sample_ratio <= 1, self, "sample_ratio", "must be above 0 and at most 1")
        for name in ("survey_interval", "probe_interval", "block_bytes", "statistics_interval"):
            require(getattr(self, name) >= 1, self, name, "must be at least 1")
        require(self.block_bytes % 64 == 0, self, "block_bytes", "must be a multiple of 64")
        scheduler = self.scheduler
        require(
            scheduler is None or isinstance(scheduler, ThresholdScheduler),
            self,
            "scheduler",
            "must be a ThresholdScheduler or None",
        )
        if scheduler is not None:
            fine = scheduler.lower <= self.threshold <= scheduler.upper
            bounds = f"must lie within the scheduler's bounds, {scheduler.lower} and {scheduler.upper}"
            require(fine, self, "threshold", bounds)
        fine = self.exchange in ("allreduce", "parameter-server")
        require(fine, self, "exchange", "must be 'allreduce' or 'parameter-server'")
        fine = self.servers is None or self.servers >= 1
        require(fine, self, "servers", "must be at least 1, or None for all workers")
        served = self.exchange == "parameter-server"
        require(served or self.servers is None, self, "servers", 'needs exchange="parameter-server"')
        fine = not self.dedicated_servers or self.servers is not None
        require(fine, self, "dedicated_servers", 'needs exchange="parameter-server" and servers=N')
        require(self.granularity in ("tensor", "block"), self, "granularity", "must be 'tensor' or 'block'")
        require(self.buffers in ("local", "average"), self, "buffers", "must be 'local' or 'average'")
        require(0 <= self.seed < 1 << 64, self, "seed", "must be an integer from 0 to 2^64 - 1")

    parts: ClassVar = {"scheduler": ThresholdScheduler}
    steps = "sordino.algorithms.caps.strategy:CaPSStrategy"
    former_labels = ("ParameterSkipping",)
    simulation = Simulation(
        arrays="caps",
        # `seed` belongs to a detector that cannot be chosen in a simulation without data.
        imitated=frozenset(
            {"threshold", "digits", "probe_interval", "exchange", "servers", "granularity", "block_bytes", "seed"}
        ),
        refused={
            "buffers": NO_BUFFERS,
            "dedicated_servers": "in a simulation all ranks are workers; give servers=... without it",
            "scheduler": "the threshold would follow metrics, which a simulation does not report; give threshold=...",
            "statistics_interval": "a simulation does not show the statistics of skipping",
        },
    )

    @property
    def traits(self) -> Traits:
        served = self.exchange == "parameter-server"
        return Traits(
            averages_buffers=self.buffers == "average",
            sends_gradients=False,
            ends_with='CaPS(exchange="parameter-server")' if served else None,
            whole_parameters="it decides for whole tensors whether they are sent",
        )

    def items_of(self, sizes: Sequence[float]) -> list[float]:
        """Return the bytes of each item (tensor or block) that is skipped separately, for tensors of these sizes."""
        if self.granularity == "tensor":
            return list(sizes)
        return cut(sizes, self.block_bytes)

    def traffic(self, model: Model, nodes: Sequence[int]) -> Traffic:
        roles, size = self.roles(nodes), len(nodes)
        all_ranks = groups_of(size, size)
        items = [model.scale * item for item in self.items_of([round(size / model.scale) for size in model.sizes])]
        mask = Reduction(all_ranks[:, roles.workers], [float(len(items))])

        def reduced(round: int, sent: Sent | None) -> list[Operation]:
            return [mask, Reduction(all_ranks, [sum(_going(items, sent))])]

        if self.exchange == "allreduce":
            return Traffic([Phase(reduced)])
        servers = self.serving_ranks(size)
        limit = piece_bytes(ceil(sum(items)), len(servers))

        def served(round: int, sent: Sent | None) -> list[Operation]:
            loads = [0.0] * size
            pieces = cut(_going(items, sent), limit)
            for piece, place in zip(pieces, place_by_size(pieces, len(servers))):
                loads[servers[place]] += piece
            flags: list[Operation] = [from_owners(all_ranks, [float(len(items))])] if roles.helpers else []
            workers = len(roles.workers)
            ways = [to_owners(all_ranks, loads, workers=workers), from_owners(all_ranks, loads, workers=workers)]
            return [mask, *flags, *ways]

        return Traffic([Phase(served)])

    def check_simulation(self, workers: int) -> None:
        if self.exchange == "parameter-server":
            messages = 2 * workers * len(self.serving_ranks(workers))
            if messages > _MOST_MESSAGES:
                raise UsageError(
                    f"CaPS(servers={self.servers}): {messages} messages per step among {workers} workers; "
                    f"the limit of the simulation is {_MOST_MESSAGES}. Give fewer servers or workers"
                )

    @classmethod
    def candidates(cls, nodes: Sequence[int], interval: int) -> list[Algorithm]:
        return []  # the bytes sent depend on the training

    # ---- ranks without a model ---------------------------------------------------------------------------------

    @property
    def dedicated(self) -> bool:
        return self.dedicated_servers

    def helped_alike(self, other: Algorithm) -> bool:
        return isinstance(other, CaPS) and other.dedicated and other.servers == self.servers

    def open_service(self, helpers: Helpers, description: Any) -> Service:
        service: Service = made("sordino.algorithms.caps.parameter_server:helper_server", helpers, self, description)
        return service

    def roles(self, nodes: Sequence[int]) -> ServerRoles:
        """Return which ranks train and which serve; `nodes` is the node of each rank.

        Raises:
            UsageError: no rank would be left to train.
        """
        helpers = (self.servers or 0) if self.dedicated_servers else 0
        workers = len(nodes) - helpers
        if workers < 1:
            raise UsageError(
                f"{self!r}: {helpers} of {len(nodes)} ranks serve, so no rank is left to train. Start more ranks, or "
                "give fewer servers"
            )
        return ServerRoles(list(range(workers)), list(range(workers, len(nodes))))

    def serving_ranks(self, size: int) -> list[int]:
        """Return the servers among `size` ranks, including dedicated ones.

        Raises:
            UsageError: there are fewer ranks than `servers`.
        """
        if self.servers is None:
            return list(range(size))
        if self.servers > size:
            raise UsageError(f"CaPS(servers={self.servers}): must be at most {size}, the number of ranks")
        if self.dedicated_servers:
            return list(range(size - self.servers, size))
        return [index * size // self.servers for index in range(self.servers)]


def _going(items: Sequence[float], sent: Sent | None) -> Sequence[float]:
    return items if sent is None else [item for item, goes in zip(items, sent, strict=True) if goes]


def cut(sizes: Sequence[float], limit: float) -> list[float]:
    """Return the sizes of the pieces, of up to `limit` bytes, into which tensors of these sizes are cut."""
    return [min(limit, size - begin) for size in sizes for begin in _steps(size, limit)]


def _steps(size: float, limit: float) -> list[float]:
    return [k * limit for k in range(ceil(size / limit))]


def piece_bytes(total: int, servers: int) -> int:
    """Return the largest size, in bytes, of the pieces that are placed on servers. Larger tensors are cut.

    It is an eighth of a server's share of `total` bytes, so that no large tensor fills a server alone; at least 64 KiB.
    """
    return max(64 * 1024, -(-total // (8 * servers * 64)) * 64)


def place_by_size(sizes: Sequence[float], servers: int) -> list[int]:
    """Return the server of each tensor: tensors are placed longest first, each on the server with the fewest bytes.

    The fullest server of n gets at most 4/3 - 1/(3n) times the bytes of the fullest one in the best placement. Source:
    Graham 1969 ("LPT").

    Args:
        sizes: bytes of each tensor.
        servers: number of servers.
    """
    loads = [(0.0, server) for server in range(servers)]
    placed = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        load, server = heapq.heappop(loads)
        placed[index] = server
        heapq.heappush(loads, (load + sizes[index], server))
    return placed
