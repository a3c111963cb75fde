"""What an algorithm sends, said once: operations among sets of workers, and in which steps they come.

An algorithm describes its traffic in these words (`Algorithm.traffic`). `sordino plan` turns them into seconds by the
measured cost of a byte and of a message, `sordino simulate` into messages in virtual time; neither knows an algorithm.
What is counted are payloads; flags beside gradients, and padding, are not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sordino._core import FromOwner, ToOwner, Topology
from sordino.runtime.segments import Segments, segment_numbers

Sets = NDArray[np.int64]
Sent = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Model:
    """What is trained.

    Attributes:
        names: of the tensors.
        sizes: bytes of each tensor, as links see them.
        scale: these over the bytes that there are.
    """

    names: Sequence[str]
    sizes: Sequence[float]
    scale: float = 1.0

    @property
    def bytes(self) -> float:
        """Bytes of all tensors together."""
        return sum(self.sizes)

    def segments(self, segments: Segments | Sequence[str]) -> list[float]:
        """Return the bytes of each segment (`sordino.algorithms.Crossover` says what there are)."""
        numbers = segment_numbers(self.names, self.sizes, segments)
        return [float(size) for size in np.bincount(numbers, weights=self.sizes)]

    def buckets(self, bucket_bytes: int) -> list[float]:
        """Return the bytes of each bucket of gradients, which come in the order in which backward computes them."""
        sizes = self.sizes[::-1]
        numbers = segment_numbers(self.names[::-1], sizes, bucket_bytes)
        return [float(size) for size in np.bincount(numbers, weights=sizes)]


@dataclass(frozen=True, eq=False)
class Reduction:
    """All-reduces within sets of workers at the same time, one bucket after the other.

    Attributes:
        sets: of workers, [sets, members].
        buckets: the bytes of each.
        tensors: gradients that the buckets are made of, if they are gradients.
    """

    sets: Sets
    buckets: Sequence[float]
    tensors: int = 0


@dataclass(frozen=True, eq=False)
class Exchange:
    """Averages along a topology, within sets of workers at the same time.

    Attributes:
        sets: of workers, [sets, members].
        topology: among the members of a set, by their places.
        segments: the bytes of each.
        round: of the topology.
        models: parameters are averaged, which may be old, rather than gradients.
        tensors: gradients that the segments are made of, if they are gradients.
    """

    sets: Sets
    topology: Topology
    segments: Sequence[float]
    round: int = 0
    models: bool = False
    tensors: int = 0


@dataclass(frozen=True, eq=False)
class Copies:
    """What every worker reads and writes in its own memory, beside what is sent.

    Attributes:
        bytes: read and written together.
    """

    bytes: float


Operation = Reduction | Exchange | Copies
Operations = Sequence[Operation] | Callable[[int, "Sent | None"], Sequence[Operation]]


@dataclass(frozen=True, eq=False)
class Phase:
    """Operations that come together, one after the other, in some steps.

    Attributes:
        operations: or a function of how often they have come before and, of parameter skipping, of the items that are
            sent (None: all).
        every: steps from one time to the next.
        since: the first step, numbered from 0, that counts.
        until: the first step in which they do not come any more; None: they come for ever.
        hides: what part of it can be hidden at most; backward cannot hide the last bucket.
        step: whether the whole next step may hide it, not backward alone.
        loading: whether what lies between two steps hides it, too.
    """

    operations: Operations
    every: int = 1
    since: int = 0
    until: int | None = None
    hides: float = 0.0
    step: bool = False
    loading: bool = False

    @property
    def varies(self) -> bool:
        """Whether it is not always the same."""
        return callable(self.operations)

    def at(self, round: int, sent: Sent | None = None) -> Sequence[Operation]:
        """Return its operations when it has come `round` times before."""
        return self.operations(round, sent) if callable(self.operations) else self.operations

    def round_of(self, step: int) -> int | None:
        """Return how often it has come before when it comes in this step; None if it does not."""
        rounds, rest = divmod(step - self.since + 1, self.every)
        comes = rest == 0 and step >= self.since and (self.until is None or step < self.until)
        return rounds - 1 if comes else None


@dataclass(frozen=True, eq=False)
class Traffic:
    """All that an algorithm sends.

    Attributes:
        phases: of a step, in order.
        delay: how many exchanges later it is that a worker waits for one.
    """

    phases: Sequence[Phase]
    delay: int = 0


def groups_of(workers: int, members: int) -> Sets:
    """Return groups of neighbours, [groups, members]."""
    return np.arange(workers).reshape(-1, members)


def gradients(sets: Sets, model: Model, bucket_bytes: int, **options: Any) -> Phase:
    """Return the phase in which gradients are reduced within sets of workers, behind backward.

    Args:
        sets: of workers, [sets, members].
        model: whose gradients they are.
        bucket_bytes: gradients are reduced in buckets of up to this many bytes.
        options: of the phase, in place of those that follow from these.
    """
    buckets = model.buckets(bucket_bytes)
    reduction = Reduction(sets, buckets, len(model.sizes))
    return Phase(**{"operations": [reduction], "hides": hidden(buckets), **options})


def hidden(buckets: Sequence[float]) -> float:
    """Return the part of buckets that backward can hide: all but the last, which is complete when it ends."""
    return 1 - buckets[-1] / sum(buckets)


def to_owners(sets: Sets, segments: Sequence[float], **options: Any) -> Exchange:
    """Return the exchange that gives member s of each set the mean of segment s."""
    return Exchange(sets, ToOwner(sets.shape[1], options.pop("workers", None)), segments, **options)


def from_owners(sets: Sets, segments: Sequence[float], **options: Any) -> Exchange:
    """Return the exchange in which the members of each set take over segment s from member s."""
    return Exchange(sets, FromOwner(sets.shape[1], options.pop("workers", None)), segments, **options)
