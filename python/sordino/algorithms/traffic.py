"""Description of the traffic of an algorithm: operations among sets of workers, and the steps in which they run.

An algorithm describes its traffic once, in these terms (`Algorithm.traffic`). `sordino plan` converts it to seconds
with the measured cost of a byte and of a message. `sordino simulate` converts it to messages in virtual time. Neither
knows individual algorithms. Only payloads are counted, not the flags that accompany gradients, nor padding, nor the
broadcast of parameters with which some algorithms begin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sordino._core import FromOwner, ToOwner, Topology
from sordino.codecs import Codec, FlatCodec, PowerSGD
from sordino.errors import UsageError
from sordino.runtime.exchange.segments import Segments, segment_numbers

_CODING_RATE = 0.5  # values that are encoded or decoded in the time of copying 1 value

Sets = NDArray[np.int64]
Sent = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Model:
    """Names and sizes of the tensors that are trained.

    Attributes:
        names: the name of each tensor.
        sizes: bytes of each tensor on the links.
        scale: ratio of `sizes` to the actual bytes of the tensors.
        codec: codec of the gradients, `compression=` of `DistributedOptimizer`; None: they are sent as they are.
        shapes: the shape of each tensor; None: unknown. `PowerSGD` needs them.
    """

    names: Sequence[str]
    sizes: Sequence[float]
    scale: float = 1.0
    codec: Codec | None = None
    shapes: Sequence[Sequence[int]] | None = None

    @property
    def bytes(self) -> float:
        """Bytes of all tensors together."""
        return sum(self.sizes)

    def segments(self, segments: Segments | Sequence[str]) -> list[float]:
        """Return the bytes of each segment. `sordino.algorithms.Crossover` describes the kinds of segments."""
        numbers = segment_numbers(self.names, self.sizes, segments)
        return [float(size) for size in np.bincount(numbers, weights=self.sizes)]

    def buckets(self, bucket_bytes: int) -> list[float]:
        """Return the bytes of each bucket of gradients, in the order in which backward computes them."""
        sizes = self.sizes[::-1]
        return [float(size) for size in np.bincount(self._numbers(bucket_bytes), weights=sizes)]

    def low_rank_buckets(self, bucket_bytes: int, codec: PowerSGD) -> list[float]:
        """Return the bytes of each all-reduce of encoded gradients, bucket by bucket.

        Raises:
            UsageError: shapes are unknown.
        """
        if self.shapes is None:
            raise UsageError(f"the bytes of {codec} depend on the shapes of gradients: give Model(shapes=...)")
        parts: dict[int, list[Sequence[int]]] = {}
        for number, shape in zip(self._numbers(bucket_bytes), self.shapes[::-1]):
            parts.setdefault(number, []).append(shape)
        return [4 * self.scale * count for part in parts.values() for count in codec.numbers(part) if count > 0]

    def _numbers(self, bucket_bytes: int) -> list[int]:
        """Return the number of each gradient's bucket, in the order in which backward computes gradients."""
        return segment_numbers(self.names[::-1], self.sizes[::-1], bucket_bytes)


@dataclass(frozen=True, eq=False)
class Reduction:
    """All-reduces within several sets of workers at the same time, one bucket after the other.

    Attributes:
        sets: the workers of each set, int64 [sets, members].
        buckets: the bytes of each bucket.
        tensors: number of gradients that the buckets consist of; 0 if they are not gradients.
    """

    sets: Sets
    buckets: Sequence[float]
    tensors: int = 0


@dataclass(frozen=True, eq=False)
class Exchange:
    """Averages along a topology, within several sets of workers at the same time.

    Attributes:
        sets: the workers of each set, int64 [sets, members].
        topology: the topology among the members of a set, by their places in it.
        segments: the bytes of each segment.
        round: the round of the topology.
        models: whether parameters, which may be stale, are averaged, instead of gradients.
        tensors: number of gradients that the segments consist of; 0 if they are not gradients.
        separate: whether each worker gets a message from each of its sources (encoded values), also within a node.
            Otherwise a node gets values once, and a mean over all workers is an all-reduce.
    """

    sets: Sets
    topology: Topology
    segments: Sequence[float]
    round: int = 0
    models: bool = False
    tensors: int = 0
    separate: bool = False


@dataclass(frozen=True, eq=False)
class Copies:
    """Copies that every worker makes in its own memory, in addition to messages.

    Attributes:
        bytes: bytes read plus bytes written. Other work, such as encoding, counts as the bytes that could be read and
            written in the same time.
    """

    bytes: float


Operation = Reduction | Exchange | Copies
Operations = Sequence[Operation] | Callable[[int, "Sent | None"], Sequence[Operation]]


@dataclass(frozen=True, eq=False)
class Phase:
    """Operations that run one after the other in certain steps.

    Attributes:
        operations: the operations, or a function that returns them. Its arguments are the number of earlier runs and,
            for parameter skipping, flags of the items that are sent (None: all). `sordino plan` takes the mean of the
            first 8 runs.
        every: steps from one run to the next.
        since: the first step, numbered from 0, that counts.
        until: the first step without further runs; None: the runs never end.
        hides: the largest fraction of the phase that can be hidden. Backward cannot hide the last bucket.
        step: whether the whole next step can hide the phase, not only backward.
        loading: whether the time between two steps hides the phase, too.
        overlap: number of later steps during which the phase may run: workers wait for it at the end of the last one.
            0: they wait in the step itself. Must be below `every`.
    """

    operations: Operations
    every: int = 1
    since: int = 0
    until: int | None = None
    hides: float = 0.0
    step: bool = False
    loading: bool = False
    overlap: int = 0

    @property
    def varies(self) -> bool:
        """Whether the operations can differ from run to run."""
        return callable(self.operations)

    def at(self, round: int, sent: Sent | None = None) -> Sequence[Operation]:
        """Return the operations after `round` earlier runs."""
        return self.operations(round, sent) if callable(self.operations) else self.operations

    def round_of(self, step: int) -> int | None:
        """Return the number of earlier runs if the phase runs in this step; None if it does not."""
        rounds, rest = divmod(step - self.since + 1, self.every)
        comes = rest == 0 and step >= self.since and (self.until is None or step < self.until)
        return rounds - 1 if comes else None


@dataclass(frozen=True, eq=False)
class Traffic:
    """Complete traffic of an algorithm.

    Attributes:
        phases: the phases of a step, in order.
        delay: number of exchanges after which a worker waits for an exchange that it has started.
    """

    phases: Sequence[Phase]
    delay: int = 0


def groups_of(workers: int, members: int) -> Sets:
    """Return groups of neighboring workers, int64 [groups, members]."""
    return np.arange(workers).reshape(-1, members)


def gradients(sets: Sets, model: Model, bucket_bytes: int, **options: Any) -> Phase:
    """Return the phase in which gradients are reduced within sets of workers.

    Backward hides it, unless the model has a codec.

    Args:
        sets: the workers of each set, int64 [sets, members].
        model: the model whose gradients are reduced.
        bucket_bytes: gradients are reduced in buckets of up to this many bytes.
        options: fields of the phase, which replace those computed from the other arguments.
    """
    buckets, codec = model.buckets(bucket_bytes), model.codec
    if codec is None:
        reduction = Reduction(sets, buckets, len(model.sizes))
        return Phase(**{"operations": [reduction], "hides": hidden(buckets), **options})
    if isinstance(codec, PowerSGD):
        operations: list[Operation] = [Reduction(sets, model.low_rank_buckets(bucket_bytes, codec), len(model.sizes))]
    else:
        assert isinstance(codec, FlatCodec)
        operations = [one for size in buckets for one in mean_within(sets, size, codec)]
    return Phase(**{"operations": operations, **options})


def hidden(buckets: Sequence[float]) -> float:
    """Return the fraction of the bytes that backward can hide. The last bucket is complete only when it ends."""
    return 1 - buckets[-1] / sum(buckets)


def to_owners(sets: Sets, segments: Sequence[float], **options: Any) -> Exchange:
    """Return the exchange that gives member s of each set the mean of segment s."""
    return Exchange(sets, ToOwner(sets.shape[1], options.pop("workers", None)), segments, **options)


def from_owners(sets: Sets, segments: Sequence[float], **options: Any) -> Exchange:
    """Return the exchange in which all members of each set receive segment s from member s."""
    return Exchange(sets, FromOwner(sets.shape[1], options.pop("workers", None)), segments, **options)


def mean_within(sets: Sets, size: float, codec: FlatCodec | None) -> list[Operation]:
    """Return the operations of a mean within sets of workers.

    Args:
        sets: the workers of each set, int64 [sets, members].
        size: bytes of the values in float32.
        codec: codec of the values; None: an all-reduce.
    """
    if codec is None:
        return [Reduction(sets, [size])]
    encoded, members = size * codec.relative_size, sets.shape[1]
    once = 2 * size / _CODING_RATE  # to encode or to decode all values
    if codec.gathered:
        return [from_owners(sets, [encoded] * members), Copies(2 * once)]
    shards = [encoded / members] * members
    return [to_owners(sets, shards), from_owners(sets, shards), Copies(3 * once)]
