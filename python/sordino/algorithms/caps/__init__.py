"""Convergence-aware parameter skipping (CaPS): what has stopped changing is not sent."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from sordino.algorithms.base import Algorithm, Simulation, Traits, made
from sordino.algorithms.checks import NO_BUFFERS, Buffers, is_count, require
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
    from sordino.runtime.helpers import Helpers, Service

Detection = Literal["naive", "random", "history", "movement"]
_MOST_MESSAGES = 10_000_000  # a step, of all workers, in a simulation


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass(frozen=True)
class ThresholdScheduler:
    """Lowers the threshold (skips more) while a metric improves, and raises it (skips less) when that stops.

    Every `frequency` epochs it looks at the last `history_length` metrics that `optimizer.report_metric` was told, once
    an epoch. If each is better than the one before, the threshold falls by `step`; otherwise it rises by `step`. With
    fewer metrics it stays. A metric that is not a number is no improvement. Source: CaPS, section 3.2.

    Attributes:
        history_length: metrics that are looked at; the source uses 3 to 10.
        frequency: epochs from one look to the next.
        step: percentage points that the threshold moves by.
        lower, upper: where it stops, in percent.
        mode: whether "min" (a loss) or "max" (an accuracy) is better.
        improving: what happens while the metric improves: "lower" the threshold, or "keep" it.
    """

    history_length: int = 3
    frequency: int = 5
    step: float = 1.0
    lower: float = 1.0
    upper: float = 100.0
    mode: Literal["min", "max"] = "min"
    improving: Literal["lower", "keep"] = "lower"

    def __post_init__(self) -> None:
        fine = is_count(self.history_length, 2)
        require(fine, self, "history_length", "must be at least 2, for there to be a tendency")
        require(is_count(self.frequency, 1), self, "frequency", "must be at least 1")
        require(_is_number(self.step) and self.step > 0, self, "step", "must be above 0")
        require(_is_number(self.lower) and self.lower >= 0, self, "lower", "must be at least 0")
        require(
            _is_number(self.upper) and self.upper >= self.lower, self, "upper", f"must be at least lower={self.lower}"
        )
        require(self.mode in ("min", "max"), self, "mode", "must be 'min' or 'max'")
        require(self.improving in ("lower", "keep"), self, "improving", "must be 'lower' or 'keep'")

    def improves(self, metrics: Sequence[float]) -> bool:
        """Return whether each metric is better than the one before it."""
        if self.mode == "min":
            return all(late < early for early, late in pairwise(metrics))
        return all(late > early for early, late in pairwise(metrics))

    def threshold_after(self, epochs: int, threshold: float, metrics: Sequence[float]) -> float:
        """Return the threshold that follows `threshold` after so many epochs, in percent.

        Args:
            epochs: how many have ended.
            threshold: the one until now, in percent.
            metrics: of the last epochs, oldest first.
        """
        recent = metrics[-self.history_length :]
        if epochs % self.frequency != 0 or len(recent) < self.history_length:
            return threshold
        if not self.improves(recent):
            return min(threshold + self.step, self.upper)
        return threshold if self.improving == "keep" else max(threshold - self.step, self.lower)


class ServerRoles(NamedTuple):
    """Which ranks train, and which have no model and serve parameters."""

    workers: list[int]
    helpers: list[int]


@dataclass(frozen=True)
class ParameterSkipping(Algorithm):
    """CaPS: workers step on their own gradients, then average their parameters, without those that stay as they are.

    After each step every worker finds, for each tensor, the share of elements that the step has left unchanged. Where
    that is at least `threshold` percent on *all* workers, the tensor is not sent; each worker trains its own copy on.
    After `probe_interval` steps without it a tensor is sent whatever its share (a probe), so copies cannot drift apart
    for long. A tensor that is seen to move again on any worker is sent in that very step ("movement": when its average
    says so, or at its probe).

    Nothing skipped (a threshold above 100) is `LocalSGD(interval=1, exchange="allreduce")`, everything (0) is that with
    `interval=probe_interval + 1`, bit for bit (with servers to rounding). At 100 the naive detector, without `digits`,
    leaves a tensor out only where no worker has changed any element, so nothing is lost: sparse updates cost what they
    change, block by block with granularity="block". Samples and rounding see less than everything.

    Sent per step and worker, of S bytes that are not skipped: 2(N-1)/N S by all-reduce; as much with a parameter server
    on every worker; S to and from dedicated servers, or to and from `servers=k` of the workers, each of which sends
    (N-1)/k S more; beside that one byte for each tensor or block. Staleness: none for what is sent, `probe_interval`
    steps for what is skipped. Memory: the parameters once more (naive, history; 1 byte an element more for the latter),
    or two samples (random); a server keeps its share of every other node's workers' parameters. When a peer dies:
    every survivor gets `PeerLost`. Source: Jeong, "CaPS-Learning", sections 3.1 and 3.2.

    Attributes:
        detector: "naive" compares all elements; "random" a sample of `sample_ratio`, another one in each step;
            "history" the `sample_ratio` that have changed most often, so it sees fewer unchanged ones than there are;
            "movement" skips what moves least: it takes elements for unchanged that belong to a tensor whose elements
            move less, on average, than those of the others.
        threshold: percent of unchanged elements from which on a tensor is skipped; of "movement", the percent of all
            elements that are to move further than a tensor's, so that about as many are sent in every step.
        digits: elements count as unchanged if they are when rounded to so many decimals; None: if no bit has changed.
        sample_ratio: the part of each tensor that "random" and "history" compare, in (0, 1].
        survey_interval: steps from one time that "history" looks at all elements to the next.
        memory: how much of its average of movement "movement" keeps from one step to the next, in [0, 1).
        probe_interval: steps in a row that a tensor can be skipped.
        scheduler: how the threshold follows `optimizer.report_metric`, or None: it stays.
        exchange: "allreduce", or "parameter-server": each tensor goes to a server, which averages what it gets and
            hands it back; they are placed by size (longest first, large ones cut), anew when the set of skipped
            ones changes.
        servers: how many ranks serve, spread evenly; None: all workers.
        dedicated_servers: servers are the last ranks of the job, and have no model. Needs `init(algorithm=...)`.
        granularity: "tensor", or "block": tensors are cut into blocks of `block_bytes` that are skipped each by itself,
            so that large tensors take part, too.
        block_bytes: see there.
        buffers: "average" treats floating-point buffers given as `named_buffers` like parameters.
        statistics_interval: steps that make a point of `optimizer.statistics`.
        seed: of random samples; the same on all workers.
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
        fine = _is_number(self.threshold) and self.threshold >= 0
        require(fine, self, "threshold", "must be at least 0 (percent)")
        fine = self.digits is None or (is_count(self.digits, 0) and self.digits <= 15)
        require(fine, self, "digits", "must be from 0 to 15, or None for exact comparison")
        fine = self.digits is None or self.detector != "movement"
        require(fine, self, "digits", "is for detectors that compare; detector='movement' measures")
        require(_is_number(self.memory) and 0 <= self.memory < 1, self, "memory", "must be at least 0 and below 1")
        fine = _is_number(self.sample_ratio) and 0 < self.sample_ratio <= 1
        require(fine, self, "sample_ratio", "must be above 0 and at most 1")
        for name in ("survey_interval", "probe_interval", "block_bytes", "statistics_interval"):
            require(is_count(getattr(self, name), 1), self, name, "must be at least 1")
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
        fine = self.servers is None or is_count(self.servers, 1)
        require(fine, self, "servers", "must be at least 1, or None for all workers")
        served = self.exchange == "parameter-server"
        require(served or self.servers is None, self, "servers", 'is for exchange="parameter-server"')
        fine = not self.dedicated_servers or self.servers is not None
        require(fine, self, "dedicated_servers", 'needs exchange="parameter-server" and servers=, how many')
        require(self.granularity in ("tensor", "block"), self, "granularity", "must be 'tensor' or 'block'")
        require(self.buffers in ("local", "average"), self, "buffers", "must be 'local' or 'average'")
        require(is_count(self.seed, 0) and self.seed < 2**64, self, "seed", "must be an integer from 0 to 2^64 - 1")

    parts: ClassVar = {"scheduler": ThresholdScheduler}
    steps = "sordino.algorithms.caps.strategy:SkippingStrategy"
    simulation = Simulation(
        arrays="sordino.simulate.vectorized:Skipping",
        # `seed` is of a detector that cannot be chosen without data.
        imitated=frozenset(
            {"threshold", "digits", "probe_interval", "exchange", "servers", "granularity", "block_bytes", "seed"}
        ),
        refused={
            "buffers": NO_BUFFERS,
            "dedicated_servers": "here all ranks are workers; give servers=... without it",
            "scheduler": "the threshold would follow metrics that nobody reports here; give threshold=...",
            "statistics_interval": "the statistics of skipping are not shown here",
        },
    )

    @property
    def traits(self) -> Traits:
        served = self.exchange == "parameter-server"
        return Traits(
            averages_buffers=self.buffers == "average",
            sends_gradients=False,
            ends_with='ParameterSkipping(exchange="parameter-server")' if served else None,
        )

    def items_of(self, sizes: Sequence[float]) -> list[float]:
        """Return the bytes of what is decided about, tensors or blocks, of tensors of so many bytes."""
        if self.granularity == "tensor":
            return list(sizes)
        return cut(sizes, self.block_bytes)

    def traffic(self, model: Model, nodes: Sequence[int]) -> Traffic:
        roles, size = self.roles(nodes), len(nodes)
        everybody = groups_of(size, size)
        items = [model.scale * item for item in self.items_of([round(size / model.scale) for size in model.sizes])]
        mask = Reduction(everybody[:, roles.workers], [float(len(items))])

        def reduced(round: int, sent: Sent | None) -> list[Operation]:
            return [mask, Reduction(everybody, [sum(_going(items, sent))])]

        if self.exchange == "allreduce":
            return Traffic([Phase(reduced)])
        servers = self.serving_ranks(size)
        limit = piece_bytes(ceil(sum(items)), len(servers))

        def served(round: int, sent: Sent | None) -> list[Operation]:
            loads = [0.0] * size
            pieces = cut(_going(items, sent), limit)
            for piece, place in zip(pieces, place_by_size(pieces, len(servers))):
                loads[servers[place]] += piece
            told: list[Operation] = [from_owners(everybody, [float(len(items))])] if roles.helpers else []
            workers = len(roles.workers)
            ways = [to_owners(everybody, loads, workers=workers), from_owners(everybody, loads, workers=workers)]
            return [mask, *told, *ways]

        return Traffic([Phase(served)])

    def check_simulation(self, workers: int) -> None:
        if self.exchange == "parameter-server":
            messages = 2 * workers * len(self.serving_ranks(workers))
            if messages > _MOST_MESSAGES:
                raise UsageError(
                    f"ParameterSkipping(servers={self.servers}): {messages} messages a step among {workers} workers; "
                    f"the simulation takes {_MOST_MESSAGES}. Give fewer servers or workers"
                )

    @classmethod
    def candidates(cls, nodes: Sequence[int], interval: int) -> list[Algorithm]:
        return []  # what it sends depends on the training

    # ---- ranks without a model ---------------------------------------------------------------------------------

    @property
    def dedicated(self) -> bool:
        return self.dedicated_servers

    def helped_alike(self, other: Algorithm) -> bool:
        return isinstance(other, ParameterSkipping) and other.dedicated and other.servers == self.servers

    def open_service(self, helpers: Helpers, told: Any) -> Service:
        service: Service = made("sordino.algorithms.caps.parameter_server:helper_server", helpers, self, told)
        return service

    def roles(self, nodes: Sequence[int]) -> ServerRoles:
        """Return who trains and who serves, of the ranks that live on these nodes.

        Raises:
            UsageError: nobody would be left to train.
        """
        helpers = (self.servers or 0) if self.dedicated_servers else 0
        workers = len(nodes) - helpers
        if workers < 1:
            raise UsageError(f"{self!r}: of {len(nodes)} ranks {helpers} are to serve, and none is left to train")
        return ServerRoles(list(range(workers)), list(range(workers, len(nodes))))

    def serving_ranks(self, size: int) -> list[int]:
        """Return the servers among `size` ranks, dedicated ones included.

        Raises:
            UsageError: there are to be more servers than ranks.
        """
        if self.servers is None:
            return list(range(size))
        if self.servers > size:
            raise UsageError(f"ParameterSkipping(servers={self.servers}): there are only {size} ranks")
        if self.dedicated_servers:
            return list(range(size - self.servers, size))
        return [index * size // self.servers for index in range(self.servers)]


def _going(items: Sequence[float], sent: Sent | None) -> Sequence[float]:
    return items if sent is None else [item for item, goes in zip(items, sent, strict=True) if goes]


def cut(sizes: Sequence[float], limit: float) -> list[float]:
    """Return the sizes of what tensors become that are cut into pieces of up to `limit` bytes."""
    return [min(limit, size - begin) for size in sizes for begin in _steps(size, limit)]


def _steps(size: float, limit: float) -> list[float]:
    return [k * limit for k in range(ceil(size / limit))]


def piece_bytes(total: int, servers: int) -> int:
    """Return the size in bytes that larger tensors are cut to before they are placed on servers.

    It is an eighth of what each gets of `total` bytes, so that a large tensor does not fill a server alone; at least
    64 KiB.
    """
    return max(64 * 1024, -(-total // (8 * servers * 64)) * 64)


def place_by_size(sizes: Sequence[float], servers: int) -> list[int]:
    """Return the server of each tensor: the longest first, each to whom has least.

    The fullest server has at most 4/3 - 1/(3n) of what the best placement on n servers would give its fullest. Source:
    Graham 1969 ("LPT").

    Args:
        sizes: bytes of the tensors.
        servers: how many there are.
    """
    loads = [(0.0, server) for server in range(servers)]
    placed = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        load, server = heapq.heappop(loads)
        placed[index] = server
        heapq.heappush(loads, (load + sizes[index], server))
    return placed
