"""Who pulls from whom, and when: the decisions of scheduled pull gossip.

They are made by machines that are told what happens and say what to do. These know neither clock nor network, so a
simulation and real ranks run the very same ones.

A *window* is the steps between two averagings of one worker. A schedule lives on each worker. Its driver calls it with
the time and what has happened, and carries out the `Action`s that it returns. Times are the worker's own clock's; what
one worker tells another are durations, or times of the listener's clock, so clocks need not agree.

Late start: a pull begins at end - c, where c is what it is expected to take, so that it ends when the window does. Whom
to pull from is asked for no sooner than the longest known pull, and the asking itself, needs. So nodes are reserved for
a short time, and the window's end is known better. Source: wan-gossip-scheduling, Algorithm 2, section 4.3.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import NamedTuple

from sordino.algorithms.draws import Draws, Peers
from sordino.runtime.actions import Message, Skip, Tell, Wake, Warn


class Pull(NamedTuple):
    """Pull from a peer, beginning at `start`; in place of one that was to begin later."""

    peer: int
    start: float


Action = Tell | Pull | Wake | Skip | Warn

_EARLY = 1.25  # times the longest pull known: that may have been long ago, and what has not begun can still be moved


def update_time(estimate: float, measured: float, threshold: float) -> float:
    """Return what a transfer is expected to take, after one that took `measured` seconds (UPDATE_TIME).

    It is the mean of both, or `measured` alone where they differ by the share `threshold` of the estimate or more (as
    from infinity, the estimate of what was never measured).
    """
    if (1 - threshold) * estimate > measured or not (1 + threshold) * estimate > measured:
        return measured
    return (estimate + measured) / 2


def bound(longest: float, other: float) -> float:
    """Return what a transfer takes at most between two workers that have had none.

    It follows from the longest that each has had (0: none): the slower end of a link decides, and both ends have been
    the slower one, or have met one that was slower. Infinity where nothing is known.
    """
    return max(longest, other) if longest > 0 and other > 0 else math.inf


class Schedule:
    """What one worker decides: the methods say what has happened, and return what to do.

    Workers are numbered from 0 to `size` - 1. In each window the driver gets one `Pull` (more, if pulls fail or are
    moved) or `Skip`.
    """

    def __init__(self, rank: int, size: int, seed: int) -> None:
        self.rank = rank
        self._draws = Draws(rank, seed)
        self._others = Peers(rank, size)

    def window(self, now: float, end: float) -> list[Action]:
        """Note that a window has begun, and is expected to end at `end` (infinity: not known)."""
        return []

    def alarm(self, now: float, end: float) -> list[Action]:
        """Note that the time of the last `Wake` has come; `end` is what is expected now."""
        return []

    def ended(self, now: float) -> list[Action]:
        """Note that the window has ended; without a pull that is over, the worker waits."""
        return []

    def began(self, now: float) -> None:
        """Note that the pull has begun."""

    def pulled(self, now: float, peer: int, seconds: float) -> list[Action]:
        """Note that the pull is over and took so long."""
        return []

    def failed(self, now: float, peer: int) -> list[Action]:
        """Note that the pull came to nothing.

        The peer is left out until it is heard of, and another takes its place.
        """
        self._others.discard(peer)
        return [Tell(peer, ("there?",)), *self._random(now)]

    def lost(self, now: float, rank: int) -> list[Action]:
        """Note that a rank has left or died. A pull from it that is under way fails by itself."""
        self._others.discard(rank)
        return []

    def heard(self, now: float, sender: int, message: Message) -> list[Action]:
        """Take in a message that has come; its sender is alive."""
        self._others.add(sender)
        return [Tell(sender, ("here",))] if message[0] == "there?" else []

    def _random(self, now: float) -> list[Action]:
        peer = self._others.draw(self._draws)
        return [Skip()] if peer is None else [Pull(peer, now)]


class PullAfter(Schedule):
    """No overlap: pulls from a random peer when the window has ended (Algorithm 1)."""

    def ended(self, now: float) -> list[Action]:
        return self._random(now)


class PullFirst(Schedule):
    """Naive overlap: pulls from a random peer when the window begins."""

    def window(self, now: float, end: float) -> list[Action]:
        return self._random(now)


class LateStart(Schedule, ABC):
    """What starts late: asks for a peer when it is time, then pulls so that it ends with the window.

    Args:
        threshold: of `update_time`.
        patience: seconds without an answer after which whoever was asked counts as gone.
    """

    def __init__(self, rank: int, size: int, seed: int, threshold: float, patience: float) -> None:
        super().__init__(rank, size, seed)
        self._threshold, self._patience = threshold, patience
        self._number = 0  # of the window, to tell answers to it from those to others
        self._end = math.inf
        self._since = -math.inf  # when this window's asking began
        self._asked: float | None = None  # since when there is no answer
        self._armed: Pull | None = None
        self._begun = False
        self._longest = 0.0  # pull so far, in seconds; falls slowly
        self._asking = 0.0  # what asking has taken; falls slowly

    @property
    def _open(self) -> bool:
        """Whether this window has neither a pull nor an answer to wait for."""
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
        if self._armed is not None and not self._begun and self._armed.start > now:  # sooner than expected
            self._armed = Pull(self._armed.peer, now)
            return [self._armed]
        return self._ask(now) if self._open else []

    def began(self, now: float) -> None:
        self._begun = True

    def pulled(self, now: float, peer: int, seconds: float) -> list[Action]:
        self._longest = max(seconds, 0.997 * self._longest)
        return []

    def _asks_at(self, now: float, early: float) -> float:
        """Return when to look for a peer, in a window that begins now; `early` would be early enough."""
        return early

    @abstractmethod
    def _ask(self, now: float) -> list[Action]:
        """Look for a peer."""

    @abstractmethod
    def _unanswered(self, now: float) -> list[Action]:
        """Go on although whoever was asked says nothing."""

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
