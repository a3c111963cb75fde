"""Messages between workers, as arrays over all workers.

`Sends` leave as soon as their senders are ready, each by itself. In `Rounds` all workers of a set send at once, and all
wait for the slowest message. A step of an algorithm is a list of both.
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
    """Messages that leave as soon as their senders are ready.

    Attributes:
        sources, targets: sender and receiver of each message. The messages of a worker leave and arrive in this order.
        bytes: bytes of each message.
        models: whether the messages are parameters, whose age is recorded, rather than gradients.
        overlap: number of steps after which workers wait for the messages; 0: in the step itself.
        loading: whether workers load their next batch before they wait.
    """

    sources: Integers
    targets: Integers
    bytes: float | Floats
    models: bool = False
    overlap: int = 0
    loading: bool = False


@dataclass(frozen=True, eq=False)
class Rounds:
    """Messages in rounds: a round ends for all workers of a set when its slowest message has arrived.

    Attributes:
        sources, targets: sender and receiver of each message of a round, [sets, messages].
        bytes: bytes of each message.
        rounds: number of equal rounds.
        members: workers of each set, [sets, members]. All wait for the slowest message; some may send nothing.
        overlap: number of steps after which workers wait for the last round; 0: in the step itself.
        loading: whether workers load their next batch before they wait.
    """

    sources: Integers
    targets: Integers
    bytes: float
    rounds: int
    members: Integers
    overlap: int = 0
    loading: bool = False


Phase = Sends | Rounds


def all_reduce(sets: Integers, count: float) -> list[Phase]:
    """Return the all-reduces of `count` bytes within sets of workers, [sets, members].

    The schedule is the core's (csrc/topology/schedule.h).
    """
    if count == 0:
        return []
    rounds = all_reduce_rounds(sets.shape[1], small=count <= MOST_DOUBLED)
    return [Rounds(sets[:, one.sources], sets[:, one.targets], count * one.share, one.repeats, sets) for one in rounds]


def ring(sets: Integers, count: float, rounds: int) -> Rounds:
    """Return rounds in which every worker sends `count` bytes to the next worker of its set."""
    return Rounds(sets, np.roll(sets, -1, axis=1), count, rounds, sets)


def groups_of(workers: int, members: int) -> Integers:
    """Return groups of neighboring workers, [groups, members]."""
    return np.arange(workers).reshape(-1, members)
