"""Communication manager of scheduled pull gossip. It tracks free workers, current pulls and transfer times.

A worker is in one or more of these:
    _wanting    free to be pulled from, and without a pull of its own
    _content    free to be pulled from, and with a pull of its own
    _pullers    being pulled from, by `_pullers[worker]`
    _line       waiting for a peer to become free
    _gone       lost, or not responding, until its next message
"""

from __future__ import annotations

import functools
import math
from collections import OrderedDict
from collections.abc import Iterable

from sordino.algorithms.draws import Draws
from sordino.algorithms.scheduled_pull.schedule import Action, bound, update_time
from sordino.runtime.exchange.actions import Message, Tell


class Pool:
    """Set of ranks from which one can be drawn with equal probability. Every operation takes O(1)."""

    def __init__(self, ranks: Iterable[int] = ()) -> None:
        self._ranks = list(ranks)
        self._places = {rank: place for place, rank in enumerate(self._ranks)}

    def __len__(self) -> int:
        return len(self._ranks)

    def __contains__(self, rank: object) -> bool:
        return rank in self._places

    def add(self, rank: int) -> None:
        """Add a rank, unless it is present."""
        if rank not in self._places:
            self._places[rank] = len(self._ranks)
            self._ranks.append(rank)

    def discard(self, rank: int) -> None:
        """Remove a rank, if it is present."""
        place = self._places.pop(rank, None)
        if place is not None:
            last = self._ranks.pop()
            if last != rank:
                self._ranks[place] = last
                self._places[last] = place

    def draw(self, draws: Draws, but: int) -> int | None:
        """Return a random rank other than `but`, without removing it; None if there is no other."""
        place = self._places.get(but)
        count = len(self._ranks) - (place is not None)
        if count == 0:
            return None
        drawn = draws.below(count)
        return self._ranks[-1] if drawn == place else self._ranks[drawn]


_EXACT = 16  # nodes up to which numbers of ways are computed exactly


@functools.cache
def _ways(nodes: int, barred: int) -> int:
    """Return the number of ways to assign `nodes` nodes to as many workers, if `barred` of these are among the nodes.

    No worker gets itself.
    """
    if barred == 0:
        return math.factorial(nodes)
    return _ways(nodes, barred - 1) - _ways(nodes - 1, barred - 1)


class Manager:
    """Communication manager (wan-gossip-scheduling, Algorithm 2). It answers the messages of `Managed` workers.

    The source takes the front of a queue. This manager draws one of the free nodes, because a queue of equally fast
    nodes soon gives the same pairs in every window, and models travel round a ring. The draw makes all pairs equally
    likely, and the last worker to ask never finds only itself free. A pair without an earlier transfer is expected to
    take as long as the longest transfer of either, since among many workers few pairs ever meet twice.

    Args:
        size: number of workers.
        seed: seed of the draws.
        threshold: as in `update_time`.
    """

    def __init__(self, size: int, seed: int, threshold: float) -> None:
        self._draws = Draws(-1, seed)
        self._threshold = threshold
        self._wanting = Pool(range(size))  # free, and without a pull of their own
        self._content = Pool()  # free, and with a pull of their own
        self._pulls: dict[int, int] = {}  # the node that each worker pulls from
        self._pullers: dict[int, int] = {}  # the inverse: the worker that pulls from each node
        self._gone: set[int] = set()
        self._line: OrderedDict[int, tuple[float, float]] = OrderedDict()  # window and end of each waiting worker
        self._estimates: dict[tuple[int, int], float] = {}  # c, the same in both directions
        self._longest: dict[int, float] = {}  # longest transfer of each worker, in seconds

    def estimate(self, i: int, j: int) -> float:
        """Return c_ij, the expected time of a transfer between two workers in seconds; infinity before the first."""
        return self._estimates.get((min(i, j), max(i, j)), math.inf)

    def get_start_time(self, i: int, end: float) -> tuple[int, float] | None:
        """Reserve a node for i, and return it with the start of a pull that ends at `end` (GET_START_TIME).

        Both times are on i's clock. A start in the past means at once. None if no node is free.
        """
        j = self._draw(i)
        if j is None:
            return None
        self._wanting.discard(j)
        self._content.discard(j)
        self._pulls[i], self._pullers[j] = j, i
        if i in self._wanting:
            self._wanting.discard(i)
            self._content.add(i)
        takes = self._estimates.get((min(i, j), max(i, j)), bound(self._longest.get(i, 0.0), self._longest.get(j, 0.0)))
        return j, end - takes

    def _draw(self, i: int) -> int | None:
        """Return a free node for i; None if no other node is free.

        The probability of a node is proportional to the number of ways in which the workers without a pull can get
        theirs afterwards. So all assignments in which no worker gets itself are equally likely, in any order of asking.
        """
        askers = len(self._wanting) - (i in self._wanting)  # other free workers, which must not end up with themselves
        content = len(self._content)
        if askers == 0 or content == 0:
            return (self._content if askers == 0 else self._wanting).draw(self._draws, but=i)
        left = len(self._wanting) + content - 1
        if left <= _EXACT:
            one, other = _ways(left, askers - 1), _ways(left, askers)
        else:  # approximates the ratio of the two, with a relative error below 1/200
            one, other = left, left - 1
        first = self._draws.below(askers * one + content * other) < askers * one
        return (self._wanting if first else self._content).draw(self._draws, but=i)

    def update_information(self, i: int, j: int, seconds: float | None) -> None:
        """Note that i's pull from j has ended after `seconds` (None: it has failed). Frees j (UPDATE_INFORMATION)."""
        if seconds is not None:
            self._estimates[min(i, j), max(i, j)] = update_time(self.estimate(i, j), seconds, self._threshold)
            for worker in (i, j):
                self._longest[worker] = max(seconds, self._longest.get(worker, 0.0))
        if self._pulls.get(i) == j:
            self._forget(i)
            self._free(j)

    def _forget(self, i: int) -> None:
        """Note that i's pull has ended."""
        del self._pullers[self._pulls.pop(i)]
        if i in self._content:
            self._content.discard(i)
            self._wanting.add(i)

    def _free(self, j: int) -> None:
        if j not in self._gone:
            (self._content if j in self._pulls else self._wanting).add(j)

    def on_message(self, now: float, sender: int, message: Message) -> list[Action]:
        """Handle a message of a worker."""
        self._gone.discard(sender)
        if sender not in self._pullers and sender not in self._content:
            self._free(sender)  # it may have counted as gone
        word = message[0]
        if word == "done":
            seconds = float(message[2])
            self.update_information(sender, int(message[1]), seconds if seconds >= 0 else None)
        elif word == "failed":
            silent = int(message[1])
            self.update_information(sender, silent, None)
            self._give_up(silent)
        elif word == "ask":
            if sender in self._pulls:  # the sender has given up that pull
                self.update_information(sender, self._pulls[sender], None)
            self._line[sender] = float(message[1]), float(message[2])
        actions = self._serve_line()
        if word == "ask" and sender in self._line:
            actions.append(Tell(sender, ("line", float(message[1]))))
        return actions

    def lost(self, now: float, rank: int) -> list[Action]:
        """Note that a worker has left or died."""
        self._line.pop(rank, None)
        if rank in self._pulls:
            j = self._pulls[rank]
            self._forget(rank)
            self._free(j)
        self._give_up(rank)
        return self._serve_line()

    def _give_up(self, rank: int) -> None:
        self._gone.add(rank)
        self._wanting.discard(rank)
        self._content.discard(rank)

    def _serve_line(self) -> list[Action]:
        actions: list[Action] = []
        for i, (number, end) in list(self._line.items()):
            if not len(self._wanting) and not len(self._content):
                break
            found = self.get_start_time(i, end)
            if found is None:
                continue  # the only free node is i itself
            del self._line[i]
            actions.append(Tell(i, ("grant", number, *found)))
        return actions
