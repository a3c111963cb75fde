"""Negotiation of pulls, so that at most one worker pulls from a given worker at a time: without or with a manager.

Autonomous: a worker asks a peer that it believes to be free. The peer accepts one puller at a time. A worker that is
refused asks another peer. After 3 refusals in a window it is probably one of the last without a pull, while all others
may be reserved. So it reserves itself, which keeps it free, and offers a trade of pullers:

    asker A          peer B, reserved by C      puller C
    "trade"     ->
                     "move" (to A)         ->   before its pull has begun: "moved", and C pulls from A
                <-   "yes" (C)                  else: "stay", and B answers "no"

So "C pulls from B" becomes "C pulls from A, A pulls from B". Asking takes few messages, for any number of workers.

Managed: one rank, the manager (manager.py), knows the free workers and the transfer times, and never handles a model.
When it is lost, every worker continues autonomously.
"""

from __future__ import annotations

import math

from sordino.algorithms.scheduled_pull.schedule import Action, LateStart, bound, update_time
from sordino.runtime.exchange.actions import Message, Skip, Tell, Wake, Warn

_REFUSALS = 3  # in a window, before a worker trades
_PATIENCE = 8  # refusals after which it waits
_AGAIN = 0.1  # longest wait, as a fraction of the longest known pull; short, because a trade may free a worker earlier
_MOMENTS = 1 << 16  # number of equally likely moments to ask the manager
_LOOKS = 8  # draws to find a peer that is believed to be free


class Autonomous(LateStart):
    """Schedule of a worker without a manager (section 4.3). It has its own estimates and its own view of free peers.

    message                                 from              answer
    "may" window, begins in, takes          asker             "yes" window, longest pull; or "no" window, free in
    "trade" window, begins in, takes        reserved asker    as to "may"; after a trade "yes" also names the worker
                                                              that now pulls from the asker
    "move" worker to pull from instead      pulled worker     "moved" or "stay"
    "free"                                  puller            none: the reservation is over

    Times are durations in seconds. "longest pull" is the longest pull of the answering worker.
    """

    def __init__(self, rank: int, size: int, seed: int, threshold: float, patience: float) -> None:
        super().__init__(rank, size, seed, threshold, patience)
        self._estimates: dict[int, float] = {}
        self._busy: dict[int, float] = {}  # times until which peers are believed to be reserved
        self._silent: set[int] = set()  # peers that it has given up, but that may be alive
        self._asks_of = -1  # the peer that it has asked last
        self._refusals = 0
        self._puller: int | None = None  # the worker that has reserved this one; itself, while it offers a trade
        self._reserved_until = 0.0  # expected end of that reservation
        self._freed = -1  # a puller whose "free" came before the news that it had moved here
        self._trader: tuple[int, float] | None = None  # the worker that waits for the answer to "move", and its window
        self._traded = 0.0  # time of that "move"

    # ---- looking for a peer ------------------------------------------------------------------------------------

    def window(self, now: float, end: float) -> list[Action]:
        self._refusals = 0
        self._busy = {peer: until for peer, until in self._busy.items() if until > now}  # bounds its size in long runs
        return super().window(now, end)

    def pulled(self, now: float, peer: int, seconds: float) -> list[Action]:
        super().pulled(now, peer, seconds)
        self._estimates[peer] = update_time(self._estimates.get(peer, math.inf), seconds, self._threshold)
        return [Tell(peer, ("free",))]

    def failed(self, now: float, peer: int) -> list[Action]:
        self._give_up(peer)
        self._armed, self._begun = None, False
        return self._ask(now)

    def _ask(self, now: float) -> list[Action]:
        peer: int | None = None
        for _ in range(_LOOKS):
            peer = self._others.draw(self._draws)
            if peer is None:
                return self._no_peer()
            if self._busy.get(peer, now) <= now:
                break
        assert peer is not None
        self._asks_of = peer
        word = "may"
        if self._refusals >= _REFUSALS and self._reserve(now, self.rank, self._asking):
            word = "trade"
        takes = self._estimates.get(peer, self._longest)
        return self._asks(now, peer, (word, self._number, max(0.0, self._latest(peer) - now), takes))

    def _unanswered(self, now: float) -> list[Action]:
        self._give_up(self._asks_of)
        return self._give_up_asking(now)

    def _give_up(self, peer: int) -> None:
        self._others.discard(peer)
        self._silent.add(peer)

    def _no_peer(self) -> list[Action]:
        """Skip the pull, because all peers have been given up.

        Perhaps it was this worker that could not be reached. So it sends "free" to all silent peers. A peer that gets
        it counts this worker as present again, and this worker does the same for each peer that sends a message.
        """
        return [*(Tell(rank, ("free",)) for rank in sorted(self._silent)), Skip()]

    def _give_up_asking(self, now: float) -> list[Action]:
        self._asked = None
        self._release(self.rank)
        return self._ask(now)

    def _latest(self, peer: int, longest: float = 0.0) -> float:
        """Return the latest start of a pull that ends with the window.

        `longest` is the longest pull that the peer has had, in seconds (0: none).
        """
        takes = self._estimates.get(peer, bound(self._longest, longest))
        return self._end - takes if self._end != math.inf else -math.inf

    def _answered(self, now: float, sender: int, message: Message) -> list[Action]:
        word, number = message[0], message[1]
        if number != self._number or sender != self._asks_of or self._asked is None:
            return [Tell(sender, ("free",))] if word == "yes" else []
        if word == "yes":
            self._busy.pop(sender, None)
            self._release(self.rank)
            if len(message) > 3 and message[3] != self._freed:
                self._puller = int(message[3])  # the trade succeeded: that worker now pulls from this one
            return self._arm(now, sender, self._latest(sender, float(message[2])))
        self._busy[sender] = now + float(message[2])
        self._refusals += 1
        self._release(self.rank)
        self._asked = None
        if self._refusals % _PATIENCE == 0:  # most pulls are in flight, and will be over soon
            return [Wake(now + max(min(float(message[2]), _AGAIN * self._longest), 1e-3))]
        return self._ask(now)

    # ---- being pulled from -------------------------------------------------------------------------------------

    def _reserve(self, now: float, puller: int, seconds: float) -> bool:
        if self._puller is not None and now <= self._reserved_until + self._patience:
            return self._puller == puller
        self._puller, self._reserved_until, self._freed = puller, now + seconds, -1
        return True

    def _release(self, puller: int) -> None:
        if self._puller == puller:
            self._puller = None

    def _is_asked(self, now: float, sender: int, message: Message) -> list[Action]:
        word, number, begins, takes = message[0], float(message[1]), float(message[2]), float(message[3])
        if self._reserve(now, sender, begins + takes):
            return [Tell(sender, ("yes", number, self._longest))]
        waiting = self._trader is not None and now <= self._traded + self._patience
        if word == "trade" and self._puller not in (None, self.rank) and not waiting:
            assert self._puller is not None
            self._trader, self._traded = (sender, number), now
            return [Tell(self._puller, ("move", sender))]
        return [Tell(sender, ("no", number, max(0.0, self._reserved_until - now)))]

    def _is_moved(self, now: float, sender: int, target: int) -> list[Action]:
        """Answer "move": a request of the worker pulled from to pull from `target` instead."""
        armed = self._armed
        if armed is None or armed.peer != sender or self._begun or armed.start <= now or target not in self._others:
            return [Tell(sender, ("stay",))]
        return [Tell(sender, ("moved",)), *self._arm(now, target, self._latest(target))]

    def _puller_answers(self, now: float, sender: int, moved: bool) -> list[Action]:
        if self._trader is None:
            return []
        (trader, number), self._trader = self._trader, None
        if not moved or sender != self._puller:
            return [Tell(trader, ("no", number, max(0.0, self._reserved_until - now)))]
        self._puller = trader
        return [Tell(trader, ("yes", number, self._longest, sender))]

    # ---- what happens ------------------------------------------------------------------------------------------

    def on_message(self, now: float, sender: int, message: Message) -> list[Action]:
        super().on_message(now, sender, message)
        self._silent.discard(sender)
        word = message[0]
        if word in ("may", "trade"):
            return self._is_asked(now, sender, message)
        if word in ("yes", "no"):
            return self._answered(now, sender, message)
        if word == "move":
            return self._is_moved(now, sender, int(message[1]))
        if word in ("moved", "stay"):
            return self._puller_answers(now, sender, word == "moved")
        if word == "free":
            self._freed = sender
            self._release(sender)
        return []

    def lost(self, now: float, rank: int) -> list[Action]:
        super().lost(now, rank)
        self._silent.discard(rank)
        actions: list[Action] = []
        if self._trader is not None and rank in (self._trader[0], self._puller):
            actions += self._puller_answers(now, rank, moved=False)
        self._release(rank)
        if self._asked is not None and self._asks_of == rank:
            actions += self._give_up_asking(now)
        return actions


class Managed(Autonomous):
    """Schedule of a worker to which a manager assigns peers (section 4.2). It is autonomous once the manager is gone.

    message to the manager      answer
    "ask" window, end           "grant" window, peer, start; "line" window at once if no worker is free
    "done" peer, seconds        none; seconds is below 0 if nothing was pulled
    "failed" peer               none
    """

    def __init__(self, rank: int, size: int, seed: int, threshold: float, patience: float, manager: int) -> None:
        super().__init__(rank, size, seed, threshold, patience)
        self._manager: int | None = manager
        self._farewell: str | None = None  # the warning for the first question without the manager
        self._silent_manager: int | None = None  # a manager that did not answer, but may come back
        self._granted: int | None = None  # the peer that the manager has assigned to this worker
        self._in_line = False

    @property
    def managed(self) -> bool:
        """Whether there is a manager."""
        return self._manager is not None

    def _asks_at(self, now: float, early: float) -> float:
        # If pulls fill the window, all workers would ask when it begins, in the same order as before. Each would then
        # find only the node that it has just released. So each asks at a random time in the first half of the remaining
        # time.
        left = self._end - self._longest - 3 * self._asking - now
        if self._manager is None or early > now or left <= 0:
            return early
        return now + 0.5 * left * self._draws.below(_MOMENTS) / _MOMENTS

    def _ask(self, now: float) -> list[Action]:
        if self._manager is None:
            said = [Warn(self._farewell)] if self._farewell else []
            self._farewell = None
            return [*said, *super()._ask(now)]
        if not len(self._others):
            return self._no_peer()
        self._in_line = False
        return self._asks(now, self._manager, ("ask", self._number, self._end if self._end != math.inf else now))

    def _unanswered(self, now: float) -> list[Action]:
        if self._manager is None:
            return super()._unanswered(now)
        if self._in_line:
            return self._ask(now)
        silent = self._manager
        actions = self._alone(now, f"has not answered for {self._patience:g} s")
        self._silent_manager = silent
        return actions

    def _alone(self, now: float, why: str) -> list[Action]:
        self._farewell = (
            f"rank {self._manager}, which schedules the pulls, {why}: rank {self.rank} now schedules its own pulls"
        )
        self._manager = None
        asked, self._asked = self._asked is not None, None
        return self._ask(now) if asked else []

    def pulled(self, now: float, peer: int, seconds: float) -> list[Action]:
        actions = super().pulled(now, peer, seconds)
        if self._granted != peer:
            return actions
        self._granted = None
        return [Tell(self._manager, ("done", peer, seconds))] if self._manager is not None else []

    def failed(self, now: float, peer: int) -> list[Action]:
        actions = super().failed(now, peer)
        if self._granted == peer and self._manager is not None:
            actions.insert(0, Tell(self._manager, ("failed", peer)))
        self._granted = None
        return actions

    def on_message(self, now: float, sender: int, message: Message) -> list[Action]:
        word = message[0]
        if sender == self._silent_manager:
            self._manager, self._silent_manager, self._farewell = sender, None, None
        if word == "line" and message[1] == self._number:
            self._in_line = True
            return []
        if word != "grant":
            return super().on_message(now, sender, message)
        peer, start = int(message[2]), float(message[3])
        if message[1] != self._number or self._asked is None or self._manager is None:
            return [Tell(sender, ("done", peer, -1.0))]
        self._granted = peer
        return self._arm(now, peer, start)

    def lost(self, now: float, rank: int) -> list[Action]:
        actions = super().lost(now, rank)
        self._silent_manager = None if rank == self._silent_manager else self._silent_manager
        if rank == self._manager:
            return actions + self._alone(now, "is gone")
        if self._asked is not None and self._manager is not None and not len(self._others):
            self._asked = None  # the manager has no worker left to assign
            actions += self._no_peer()
        return actions
