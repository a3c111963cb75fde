"""Who averages with whom in AD-PSGD: the decisions of one worker.

They are driven like those of `sordino.algorithms.scheduled_pull.schedule`.

A worker is in one averaging at a time, so both sides average the same two values, and it declines while it is in one.
Who is declined asks another. Nobody waits while others wait for it, so there is no deadlock, whoever asks whom. Where
all ask at once, all would decline: so questions have random priorities, and a worker that asks takes back a question of
lower priority than the one that it is asked. The question of the highest priority is always taken.
Source: Lian et al. 2018, Algorithm 1, without its bipartite graph.
"""

from __future__ import annotations

from typing import NamedTuple

from sordino.algorithms.draws import Draws, Peers
from sordino.runtime.actions import Message, Skip, Tell, Wake

_DECLINES = 8  # before a worker leaves it for this time
_PRIORITIES = 1 << 20


class Average(NamedTuple):
    """Exchange values with a peer, which does the same. `number` tells this averaging from others of the two."""

    peer: int
    number: int


class Cancel(NamedTuple):
    """Leave the averaging that is under way."""


Step = Tell | Wake | Skip | Average | Cancel


class Pairing:
    """One of `size` workers. It begins averagings when its driver says so, and takes part in others'.

    Messages: "average" (number, priority) is answered by "yes" or "no" (number); "cancel" (number) ends what "yes"
    began.
    """

    def __init__(self, rank: int, size: int, seed: int, patience: float) -> None:
        self.rank = rank
        self._draws = Draws(rank, seed)
        self._others = Peers(rank, size)
        self._patience = patience
        self._size = size
        self._priority = 0
        self._number = rank  # grows by `size`: no two workers use the same one
        self._peer: int | None = None  # whom this worker asks, or averages with
        self._asked = 0.0  # since when it asks
        self._engaged = False  # averages; else it asks, if there is a peer
        self._current = 0  # the number of that averaging
        self._mine = False  # what is asked for or under way is what this worker began
        self._declines = 0
        self.under_way = False
        """Whether an averaging that this worker began is not over."""

    def begin(self, now: float) -> list[Step]:
        """Begin to average with some other worker; `under_way` tells when that is over."""
        self.under_way, self._declines = True, 0
        return self._ask(now) if self._peer is None else []

    def _ask(self, now: float) -> list[Step]:
        peer = self._others.draw(self._draws)
        if peer is None:
            self.under_way = False
            return [Skip()]
        self._number += self._size
        self._peer, self._asked, self._engaged, self._mine = peer, now, False, True
        self._priority = self._draws.below(_PRIORITIES)
        return [Tell(peer, ("average", self._number, self._priority)), Wake(now + self._patience)]

    def _next(self, now: float) -> list[Step]:
        """Note that this worker is free; if it has still to average, it asks."""
        self._peer, self._engaged = None, False
        return self._ask(now) if self.under_way else []

    def exchanged(self, now: float) -> list[Step]:
        """Note that the averaging is over."""
        self.under_way = self.under_way and not self._mine
        return self._next(now)

    def failed(self, now: float, peer: int) -> list[Step]:
        """Note that the averaging came to nothing; the peer is left out until it is heard of."""
        self._others.discard(peer)
        return self._next(now)

    def alarm(self, now: float) -> list[Step]:
        """Note that the time of the last `Wake` has come."""
        if self._peer is None or self._engaged or now < self._asked + self._patience:
            return []
        return self.failed(now, self._peer)

    def lost(self, now: float, rank: int) -> list[Step]:
        """Note that a rank has left or died. An averaging with it fails by itself."""
        self._others.discard(rank)
        return self._next(now) if rank == self._peer and not self._engaged else []

    def heard(self, now: float, sender: int, message: Message) -> list[Step]:
        """Take in a message that has come; its sender is alive."""
        self._others.add(sender)
        word, number = message[0], int(message[1])
        if word == "average":
            return self._is_asked(sender, number, int(message[2]))
        if word == "cancel":
            mine = self._engaged and sender == self._peer and number == self._current
            return [Cancel(), *self._next(now)] if mine else []
        if sender != self._peer or self._engaged or number != self._number:
            return [Tell(sender, ("cancel", number))] if word == "yes" else []
        if word == "yes":
            self._engaged, self._current = True, number
            return [Average(sender, number)]
        self._declines += 1
        if self._declines >= _DECLINES:
            self.under_way = False
            return [Skip(), *self._next(now)]
        return self._next(now)

    def _is_asked(self, sender: int, number: int, priority: int) -> list[Step]:
        if self._peer is not None and (self._engaged or (self._priority, self.rank) > (priority, sender)):
            # Of two that have asked each other, the other sees that its question is the lower one, and takes this one.
            return [] if sender == self._peer and not self._engaged else [Tell(sender, ("no", number))]
        # The other's question answers one's own, if that was to it.
        self._mine = self._mine and sender == self._peer
        self._peer, self._engaged, self._current = sender, True, number
        return [Tell(sender, ("yes", number)), Average(sender, number)]
