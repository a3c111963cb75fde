"""What workers send each other, for all workers at once: one kind of messages after another.

`Sends` set out as soon as their senders are there, each by itself; in `Rounds` everybody of a set sends at once, and
all wait for the slowest. A step of an algorithm is a list of both.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sordino._core import MOST_DOUBLED, all_reduce_rounds

Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Sends:
    """Messages that set out as soon as their senders have come so far.

    Attributes:
        sources, targets: of each message. A worker's messages leave, and arrive, in this order.
        bytes: of each.
        models: whether receivers average parameters, which may be old, rather than gradients.
    """

    sources: Integers
    targets: Integers
    bytes: float | Floats
    models: bool = False


@dataclass(frozen=True, eq=False)
class Rounds:
    """Messages of workers that go in step: a round ends for all of a set when its slowest message has arrived.

    Attributes:
        sources, targets: of each message of a round, [sets, messages].
        bytes: of each.
        rounds: that are all alike.
        members: of the sets, [sets, members]; all wait for the slowest. Who sends may be some of them.
    """

    sources: Integers
    targets: Integers
    bytes: float
    rounds: int
    members: Integers


Phase = Sends | Rounds


def all_reduce(sets: Integers, count: float) -> list[Phase]:
    """Return all-reduces of `count` bytes within sets of workers, [sets, members].

    The schedule is that of the core (csrc/topology/schedule.h).
    """
    if count == 0:
        return []
    rounds = all_reduce_rounds(sets.shape[1], small=count <= MOST_DOUBLED)
    return [Rounds(sets[:, one.sources], sets[:, one.targets], count * one.share, one.repeats, sets) for one in rounds]


def ring(sets: Integers, count: float, rounds: int) -> Rounds:
    """Return rounds in which everybody sends `count` bytes to the next one of its set."""
    return Rounds(sets, np.roll(sets, -1, axis=1), count, rounds, sets)


def groups_of(workers: int, members: int) -> Integers:
    """Return neighbours, [groups, members]."""
    return np.arange(workers).reshape(-1, members)
