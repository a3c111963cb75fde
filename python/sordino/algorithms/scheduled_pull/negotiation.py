"""How workers agree on pulls such that nobody is pulled from twice at once: without a manager, or with one.

Autonomous: a worker asks one that it believes to be free, which says yes to one at a time. Who is refused asks
another. Whoever is refused often is one of the last without a pull, when all others may be taken; so it trades places:
the one that it asks sends its own puller to the asker instead, which nobody has taken. An asking takes a few messages,
however many workers there are.

Managed: one rank, the manager (manager.py), knows who is free and what transfers took, and never
sees a model. When it is gone, every worker goes on autonomously.
"""

from __future__ import annotations

import math

from sordino.algorithms.scheduled_pull.schedule import Action, LateStart, bound, update_time
from sordino.runtime.actions import Message, Skip, Tell, Wake, Warn

_REFUSALS = 3  # before a worker trades
_PATIENCE = 8  # refusals in a row before it waits
_AGAIN = 0.1  # times the longest pull known: how long it waits at most, for others may free themselves by trading
_MOMENTS = 1 << 16  # of which one is drawn
_LOOKS = 8  # for one that is believed to be free


class Autonomous(LateStart):
    """A worker that decides for itself (section 4.3). It keeps its own estimates, and its own view of who is free.

    Messages: "may" (window, begins in, takes) is answered by "yes" (window, its longest pull) or "no" (window, free
    in); "trade" likewise, from a worker that has reserved itself, and then "yes" names who pulls from it now; "move"
    (whom to pull from instead) by "moved" or "stay"; "free" ends a reservation.
    """

    def __init__(self, rank: int, size: int, seed: int, threshold: float, patience: float) -> None:
        super().__init__(rank, size, seed, threshold, patience)
        self._estimates: dict[int, float] = {}
        self._busy: dict[int, float] = {}  # until when others are believed to be taken
        self._silent: set[int] = set()  # whom it has given up, but who may be there
        self._asks_of = -1
        self._refusals = 0
        self._puller: int | None = None  # who has reserved this worker; itself, while it offers a trade
        self._reserved_until = 0.0  # by when that should be over
        self._freed = -1  # who has ended its pull before this worker heard that it had moved here
        self._trader: tuple[int, float] | None = None  # who waits for this worker's puller to move, and its window
        self._traded = 0.0  # since when

    # ---- looking for a peer ------------------------------------------------------------------------------------

    def window(self, now: float, end: float) -> list[Action]:
        self._refusals = 0
        self._busy = {peer: until for peer, until in self._busy.items() if until > now}  # a few, however long it runs
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
                return self._nobody()
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

    def _nobody(self) -> list[Action]:
        """Skip the pull, as all have been given up.

        Maybe it was this worker that could not be reached: all who hear of it take it up again, and it whoever answers
        or asks.
        """
        return [*(Tell(rank, ("free",)) for rank in sorted(self._silent)), Skip()]

    def _give_up_asking(self, now: float) -> list[Action]:
        self._asked = None
        self._release(self.rank)
        return self._ask(now)

    def _latest(self, peer: int, longest: float = 0.0) -> float:
        """Return when a pull must begin to end with the window.

        `longest` is the longest pull that the peer knows of.
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
                self._puller = int(message[3])  # the trade: it pulls from this worker now
            return self._arm(now, sender, self._latest(sender, float(message[2])))
        self._busy[sender] = now + float(message[2])
        self._refusals += 1
        self._release(self.rank)
        self._asked = None
        if self._refusals % _PATIENCE == 0:  # most pulls are under way, and will be over soon
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
        """Answer whoever is pulled from and asks to be left for another."""
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

    def heard(self, now: float, sender: int, message: Message) -> list[Action]:
        super().heard(now, sender, message)
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
    """A worker that a manager tells whom to pull from (section 4.2), and that is autonomous once the manager is gone.

    Messages to the manager: "ask" (window, end) is answered by "grant" (window, peer, start) or, while nobody is free,
    "line" (window); "done" (peer, seconds), seconds below 0 if nothing was pulled; "failed" (peer).
    """

    def __init__(self, rank: int, size: int, seed: int, threshold: float, patience: float, manager: int) -> None:
        super().__init__(rank, size, seed, threshold, patience)
        self._manager: int | None = manager
        self._farewell: str | None = None  # what to say once it is missed
        self._silent_manager: int | None = None  # who may come back
        self._granted: int | None = None  # whom the manager has given to this worker
        self._in_line = False

    @property
    def managed(self) -> bool:
        """Whether there is a manager."""
        return self._manager is not None

    def _asks_at(self, now: float, early: float) -> float:
        # Where pulls fill the window all ask when it begins: in the same order as in the one before, each when the only
        # free one is the one that it has just given back. So they ask at some moment of the first half of what is left.
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
            return self._nobody()
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
            f"rank {self._manager}, which schedules the pulls, {why}: from now on rank {self.rank} does so itself"
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

    def heard(self, now: float, sender: int, message: Message) -> list[Action]:
        word = message[0]
        if sender == self._silent_manager:
            self._manager, self._silent_manager, self._farewell = sender, None, None
        if word == "line" and message[1] == self._number:
            self._in_line = True
            return []
        if word != "grant":
            return super().heard(now, sender, message)
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
            self._asked = None  # the manager has nobody to grant any more
            actions += self._nobody()
        return actions
