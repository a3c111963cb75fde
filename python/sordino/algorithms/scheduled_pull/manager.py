"""The communication manager of scheduled pull gossip: who is free, who pulls from whom, and what transfers take."""

from __future__ import annotations

import functools
import math
from collections import OrderedDict
from collections.abc import Iterable

from sordino.algorithms.draws import Draws
from sordino.algorithms.scheduled_pull.schedule import Action, bound, update_time
from sordino.runtime.actions import Message, Tell


class Pool:
    """Ranks, one of which can be drawn, all as likely; O(1) for each."""

    def __init__(self, ranks: Iterable[int] = ()) -> None:
        self._ranks = list(ranks)
        self._places = {rank: place for place, rank in enumerate(self._ranks)}

    def __len__(self) -> int:
        return len(self._ranks)

    def __contains__(self, rank: object) -> bool:
        return rank in self._places

    def add(self, rank: int) -> None:
        """Put a rank in, unless it is there."""
        if rank not in self._places:
            self._places[rank] = len(self._ranks)
            self._ranks.append(rank)

    def discard(self, rank: int) -> None:
        """Take a rank out, if it is there."""
        place = self._places.pop(rank, None)
        if place is not None:
            last = self._ranks.pop()
            if last != rank:
                self._ranks[place] = last
                self._places[last] = place

    def draw(self, draws: Draws, but: int) -> int | None:
        """Return one of them that is not `but`; None if there is none. It stays in."""
        place = self._places.get(but)
        count = len(self._ranks) - (place is not None)
        if count == 0:
            return None
        drawn = draws.below(count)
        return self._ranks[-1] if drawn == place else self._ranks[drawn]


_EXACT = 16  # nodes


@functools.cache
def _ways(nodes: int, barred: int) -> int:
    """Return how many ways there are to give so many nodes to as many workers, so many of them barred from one each."""
    if barred == 0:
        return math.factorial(nodes)
    return _ways(nodes, barred - 1) - _ways(nodes - 1, barred - 1)


class Manager:
    """The communication manager (wan-gossip-scheduling, Algorithm 2). It answers what `Managed` workers ask.

    Where the source takes the front of a queue, this draws one of the free nodes: a queue of equally fast nodes soon
    hands out the same pairs in every window, and models travel round a ring. It is drawn such that the last one to ask
    never finds only itself free, and that no pair is more likely than another. A pair that has had no transfer is
    expected to take as long as the longest of either; among many workers few pairs ever meet twice.

    Args:
        size: how many workers there are.
        threshold: of `update_time`.
    """

    def __init__(self, size: int, seed: int, threshold: float) -> None:
        self._draws = Draws(-1, seed)
        self._threshold = threshold
        self._wanting = Pool(range(size))  # free, and without a pull of their own
        self._content = Pool()  # free, with one
        self._pulls: dict[int, int] = {}  # who pulls from whom
        self._pullers: dict[int, int] = {}  # by whom they pull from
        self._gone: set[int] = set()
        self._line: OrderedDict[int, tuple[float, float]] = OrderedDict()  # window and end of who waits
        self._estimates: dict[tuple[int, int], float] = {}  # c, which is the same both ways
        self._longest: dict[int, float] = {}  # transfer of each worker

    def estimate(self, i: int, j: int) -> float:
        """Return c_ij: what a transfer between two workers is expected to take, in seconds.

        It is infinity until there was one.
        """
        return self._estimates.get((min(i, j), max(i, j)), math.inf)

    def get_start_time(self, i: int, end: float) -> tuple[int, float] | None:
        """Return from whom i is to pull, and since when for the pull to end at `end` (GET_START_TIME).

        Both times are on i's clock; the start may be in the past: at once. Reserves that node. None if no node is free.
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
        """Return a free node for i.

        Each is as likely as there are ways for those that have no pull yet to find theirs after it; so whatever the
        order in which all ask, all the ways in which nobody gets itself are as likely.
        """
        askers = len(self._wanting) - (i in self._wanting)  # others that are free, and must not be left with themselves
        content = len(self._content)
        if askers == 0 or content == 0:
            return (self._content if askers == 0 else self._wanting).draw(self._draws, but=i)
        left = len(self._wanting) + content - 1
        if left <= _EXACT:
            one, other = _ways(left, askers - 1), _ways(left, askers)
        else:  # what their quotient comes near to, by less than a part in 200
            one, other = left, left - 1
        first = self._draws.below(askers * one + content * other) < askers * one
        return (self._wanting if first else self._content).draw(self._draws, but=i)

    def update_information(self, i: int, j: int, seconds: float | None) -> None:
        """Note that i's pull from j is over, and took so many seconds (UPDATE_INFORMATION).

        None for these: it came to nothing. Frees j.
        """
        if seconds is not None:
            self._estimates[min(i, j), max(i, j)] = update_time(self.estimate(i, j), seconds, self._threshold)
            for worker in (i, j):
                self._longest[worker] = max(seconds, self._longest.get(worker, 0.0))
        if self._pulls.get(i) == j:
            self._forget(i)
            self._free(j)

    def _forget(self, i: int) -> None:
        """Note that i pulls no more."""
        del self._pullers[self._pulls.pop(i)]
        if i in self._content:
            self._content.discard(i)
            self._wanting.add(i)

    def _free(self, j: int) -> None:
        if j not in self._gone:
            (self._content if j in self._pulls else self._wanting).add(j)

    def heard(self, now: float, sender: int, message: Message) -> list[Action]:
        """Take in a message of a worker that has come."""
        self._gone.discard(sender)
        if sender not in self._pullers and sender not in self._content:
            self._free(sender)  # it may have been given up
        word = message[0]
        if word == "done":
            seconds = float(message[2])
            self.update_information(sender, int(message[1]), seconds if seconds >= 0 else None)
        elif word == "failed":
            silent = int(message[1])
            self.update_information(sender, silent, None)
            self._give_up(silent)
        elif word == "ask":
            if sender in self._pulls:  # which it has given up
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
                continue  # only i itself is free
            del self._line[i]
            actions.append(Tell(i, ("grant", number, *found)))
        return actions
