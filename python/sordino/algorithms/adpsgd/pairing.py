"""State machine that decides with which peer a worker of AD-PSGD averages.

Its driver calls a method for each event, with the time, and carries out the steps that the method returns.

    state      event -> next state
    free       `begin`: ask a random peer -> asking; skip if there is none
               asked: answer "yes" -> averaging; if `declining`, "no"
    asking     "yes" -> averaging;  "no", no answer in time, or peer lost: ask a random peer;  after 8 declines -> free
               asked with higher priority: answer "yes" -> averaging;  with lower: "no", but nothing to its peer
    averaging  done, failed or "cancel" -> free, or -> asking if an averaging of its own is pending
               asked: answer "no"

A worker is in one averaging at a time, so both sides average the same two values. A worker answers questions also
while it waits for an answer, so no choice of peers leads to a deadlock. Without priorities, all would decline if all
asked at once. So questions have random priorities: an asking worker that gets a question of higher priority withdraws
its own and accepts. If all ask at once, the question of highest priority is always accepted. If a withdrawn question
gets a "yes", the worker replies "cancel".
Source: Lian et al. 2018, Algorithm 1, without its bipartite graph.
"""

from __future__ import annotations

from typing import NamedTuple

from sordino.algorithms.draws import Draws, Peers
from sordino.runtime.exchange.actions import Message, Skip, Tell, Wake

_DECLINES = 8  # after which a worker skips this averaging
_PRIORITIES = 1 << 20


class Average(NamedTuple):
    """Exchange values with a peer, which does the same. `number` identifies this averaging of the two workers."""

    peer: int
    number: int


class Cancel(NamedTuple):
    """Abandon the current averaging."""


Step = Tell | Wake | Skip | Average | Cancel


class Pairing:
    """One of `size` workers. It starts an averaging when its driver calls `begin`, and joins averagings of peers.

    Messages: "average" (number, priority) is the question, answered by "yes" (number) or "no" (number). "cancel"
    (number) ends the averaging that a "yes" has started.
    """

    def __init__(self, rank: int, size: int, seed: int, patience: float) -> None:
        self.rank = rank
        self._draws = Draws(rank, seed)
        self._others = Peers(rank, size)
        self._patience = patience
        self._size = size
        self._priority = 0
        self._number = rank  # number of its last question; grows by `size`, so no two workers use the same number
        self._peer: int | None = None  # the peer that this worker asks or averages with; None: it is free
        self._asked = 0.0  # time of the question
        self._engaged = False  # True: averages with the peer; False: asks it
        self._current = 0  # number of the current averaging
        self._mine = False  # whether this worker asked, and not the peer
        self._declines = 0
        self.declining = False
        """Whether this worker declines all questions. Its driver sets it, while the worker is free."""
        self.under_way = False
        """Whether an averaging that this worker has started is still pending."""

    def begin(self, now: float) -> list[Step]:
        """Start to average with a random peer. `under_way` is True until that averaging has ended."""
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
        """Note that this worker is free. If an averaging of its own is pending, ask a peer."""
        self._peer, self._engaged = None, False
        return self._ask(now) if self.under_way else []

    def exchanged(self, now: float) -> list[Step]:
        """Note that the averaging has ended."""
        self.under_way = self.under_way and not self._mine
        return self._next(now)

    def failed(self, now: float, peer: int) -> list[Step]:
        """Note that the averaging has failed. The peer is not drawn until it sends a message."""
        self._others.discard(peer)
        return self._next(now)

    def alarm(self, now: float) -> list[Step]:
        """Note that the time of the last `Wake` has come. Without an answer in time, ask another peer."""
        if self._peer is None or self._engaged or now < self._asked + self._patience:
            return []
        return self.failed(now, self._peer)

    def lost(self, now: float, rank: int) -> list[Step]:
        """Note that a rank has left or died. `failed` or `exchanged` still ends an averaging with it."""
        self._others.discard(rank)
        return self._next(now) if rank == self._peer and not self._engaged else []

    def on_message(self, now: float, sender: int, message: Message) -> list[Step]:
        """Handle a message. It also shows that its sender is alive."""
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
        busy = self._peer is not None and (self._engaged or (self._priority, self.rank) > (priority, sender))
        if busy or self.declining:
            # If the two have asked each other, the peer has the lower priority, and accepts this worker's question.
            return [] if sender == self._peer and not self._engaged else [Tell(sender, ("no", number))]
        # If this worker has asked the sender, the sender's question also answers this worker's question.
        self._mine = self._mine and sender == self._peer
        self._peer, self._engaged, self._current = sender, True, number
        return [Tell(sender, ("yes", number)), Average(sender, number)]
