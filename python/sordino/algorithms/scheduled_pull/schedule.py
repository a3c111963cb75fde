"""Schedules of scheduled pull gossip: state machines that decide from which peer a worker pulls, and when.

A schedule knows neither clock nor network, so a simulation and real ranks run the same code. Each worker has one. Its
driver calls it with the time and an event, and carries out the `Action`s that it returns. A *window* consists of the
steps between two averagings of one worker. Times are in seconds on the worker's own clock. Messages contain durations,
or times on the receiver's clock, so clocks need not agree.

Late start (`LateStart`), in each window:

    window begins        asks for a peer        pull starts at end - c        window ends
    |--------------------|----------------------|-----------------------------|
      open: `Wake` set     asked                  armed, then begun             averages once pulled

Here c is the expected duration of the pull, so that it ends with the window. A worker asks no sooner than the longest
known pull and the asking itself require. So workers are reserved only briefly, and the estimate of the window's end is
better. Source: wan-gossip-scheduling, Algorithm 2, section 4.3.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import NamedTuple

from sordino.algorithms.draws import Draws, Peers
from sordino.runtime.exchange.actions import Message, Skip, Tell, Wake, Warn


class Pull(NamedTuple):
    """Pull from a peer, starting at `start`. Replaces an earlier `Pull` that has not begun."""

    peer: int
    start: float


Action = Tell | Pull | Wake | Skip | Warn

_EARLY = 1.25  # lead of a question, in longest known pulls: pulls may get longer, and be moved before they begin


def update_time(estimate: float, measured: float, threshold: float) -> float:
    """Return the new estimate of a transfer time, after a transfer of `measured` seconds (UPDATE_TIME).

    It is the mean of both, or `measured` alone if they differ by the fraction `threshold` of the estimate or more. The
    estimate before the first measurement is infinity.
    """
    if (1 - threshold) * estimate > measured or not (1 + threshold) * estimate > measured:
        return measured
    return (estimate + measured) / 2


def bound(longest: float, other: float) -> float:
    """Return an upper bound of the time of a transfer between two workers that have had none, in seconds.

    The arguments are the longest transfer of each (0: none). The slower end of a link decides its speed. In earlier
    transfers each worker was the slower end, or met one that was slower. Infinity if either has had no transfer.
    """
    return max(longest, other) if longest > 0 and other > 0 else math.inf


class Schedule:
    """Decisions of one worker. Each method reports an event, and returns the actions that follow.

    Workers are numbered from 0 to `size` - 1. In each window the driver gets one `Pull` (more, if pulls fail or are
    moved) or `Skip`.
    """

    def __init__(self, rank: int, size: int, seed: int) -> None:
        self.rank = rank
        self._draws = Draws(rank, seed)
        self._others = Peers(rank, size)

    def window(self, now: float, end: float) -> list[Action]:
        """Note that a window has begun, and is expected to end at `end` (infinity: unknown)."""
        return []

    def alarm(self, now: float, end: float) -> list[Action]:
        """Note that the time of the last `Wake` has come. `end` is the current estimate of the window's end."""
        return []

    def ended(self, now: float) -> list[Action]:
        """Note that the window has ended. The worker waits until its pull has ended."""
        return []

    def began(self, now: float) -> None:
        """Note that the pull has begun."""

    def pulled(self, now: float, peer: int, seconds: float) -> list[Action]:
        """Note that the pull from `peer` has ended, and took `seconds`."""
        return []

    def failed(self, now: float, peer: int) -> list[Action]:
        """Note that the pull has failed.

        The peer is not drawn again until it sends a message. Another peer takes its place.
        """
        self._others.discard(peer)
        return [Tell(peer, ("there?",)), *self._random(now)]

    def lost(self, now: float, rank: int) -> list[Action]:
        """Note that a rank has left or died. A pull from it that is in flight fails without this call."""
        self._others.discard(rank)
        return []

    def on_message(self, now: float, sender: int, message: Message) -> list[Action]:
        """Handle a message. It also shows that its sender is alive."""
        self._others.add(sender)
        return [Tell(sender, ("here",))] if message[0] == "there?" else []

    def _random(self, now: float) -> list[Action]:
        peer = self._others.draw(self._draws)
        return [Skip()] if peer is None else [Pull(peer, now)]


class PullAfter(Schedule):
    """Schedule without overlap: pulls from a random peer after the window has ended (Algorithm 1)."""

    def ended(self, now: float) -> list[Action]:
        return self._random(now)


class PullFirst(Schedule):
    """Schedule with naive overlap: pulls from a random peer when the window begins."""

    def window(self, now: float, end: float) -> list[Action]:
        return self._random(now)


class LateStart(Schedule, ABC):
    """Schedule with late start: asks for a peer late in the window, then pulls so that the pull ends with the window.

    Args:
        threshold: as in `update_time`.
        patience: seconds without an answer after which the asked rank counts as gone.
    """

    def __init__(self, rank: int, size: int, seed: int, threshold: float, patience: float) -> None:
        super().__init__(rank, size, seed)
        self._threshold, self._patience = threshold, patience
        self._number = 0  # number of the window, to recognize late answers to questions of earlier windows
        self._end = math.inf
        self._since = -math.inf  # time of this window's first question
        self._asked: float | None = None  # time of the question that is not answered yet
        self._armed: Pull | None = None
        self._begun = False
        self._longest = 0.0  # longest pull so far, in seconds; decays slowly
        self._asking = 0.0  # longest time spent asking, in seconds; decays slowly

    @property
    def _open(self) -> bool:
        """Whether this window has neither a pull nor a pending question."""
        return self._armed is None and self._asked is None

    def window(self, now: float, end: float) -> list[Action]:
        self._number += 1
        self._end, self._since, self._asked, self._armed, self._begun = end, -math.inf, None, None, False
        if self._longest == 0 or end == math.inf:
            return self._ask(now)
        at = self._asks_at(now, end - _EARLY * self._longest - 6 * self._asking)
        return [Wake(at)] if at > now else self._ask(now)

    def alarm(self, now: float, end: float) -> list[Action]:
        if self._asked is not None:
            return self._unanswered(now) if now >= self._asked + self._patience else []
        self._end = end
        return self._ask(now) if self._open else []

    def ended(self, now: float) -> list[Action]:
        self._end = min(self._end, now)
        if self._armed is not None and not self._begun and self._armed.start > now:  # the window ended early
            self._armed = Pull(self._armed.peer, now)
            return [self._armed]
        return self._ask(now) if self._open else []

    def began(self, now: float) -> None:
        self._begun = True

    def pulled(self, now: float, peer: int, seconds: float) -> list[Action]:
        self._longest = max(seconds, 0.997 * self._longest)
        return []

    def _asks_at(self, now: float, early: float) -> float:
        """Return the time to ask for a peer, in a window that begins now. `early` is the latest sufficient time."""
        return early

    @abstractmethod
    def _ask(self, now: float) -> list[Action]:
        """Ask for a peer."""

    @abstractmethod
    def _unanswered(self, now: float) -> list[Action]:
        """Continue after a question that was not answered within `patience`."""

    def _asks(self, now: float, to: int, message: Message) -> list[Action]:
        if self._since == -math.inf:
            self._since = now
        self._asked = now
        return [Tell(to, message), Wake(now + self._patience)]

    def _arm(self, now: float, peer: int, start: float) -> list[Action]:
        if self._armed is None:
            self._asking = max(now - self._since, 0.97 * self._asking)
        self._asked = None
        self._armed = Pull(peer, max(now, start))
        return [self._armed]
