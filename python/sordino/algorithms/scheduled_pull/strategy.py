"""Scheduled pull gossip in an optimizer: step on one's own gradients, and average with what was pulled.

The parameters are published after every step; after every window a worker takes the mean with what was pulled of one
other worker.

Whom to pull from, and when, is the schedule's to say (schedule.py, negotiation.py), and `Agent`'s thread carries it
out. Publishing is one copy; answering pulls is the core's, and no thread of this rank's Python has a part in it.
"""

from __future__ import annotations

import math
import statistics
import time
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sordino._core import Pull as CorePull
from sordino._core import SnapshotStore
from sordino.algorithms.exchanging import ExchangingStrategy
from sordino.algorithms.scheduled_pull import ScheduledPull
from sordino.algorithms.scheduled_pull.schedule import Pull
from sordino.errors import UsageError
from sordino.runtime.actions import Message, Skip
from sordino.runtime.async_agent import Agent, meet, service_numbers
from sordino.runtime.context import Context
from sordino.runtime.flat_buffer import Mirror, ParameterBuffer
from sordino.runtime.objects import allgather_object

_TO_MANAGER = ("ask", "done", "failed")
_WINDOWS = 5  # whose durations tell what the next one takes


@dataclass
class PullStatistics:
    """What pulls have brought and cost this rank.

    Attributes:
        windows: that have ended.
        pulls: that were averaged with.
        failed: pulls that came to nothing; another took their place.
        messages: that were sent for the scheduling.
        unpublished: steps after which there was no place for a snapshot.
        waited: seconds that training has waited at the ends of windows.
        ages: of what was averaged with, in seconds, the last 1,000.
        seconds: that these pulls took.
        behind: steps of this rank less steps of the peer when it published, for these pulls.
    """

    windows: int = 0
    pulls: int = 0
    failed: int = 0
    messages: int = 0
    unpublished: int = 0
    waited: float = 0.0
    ages: deque[float] = field(default_factory=lambda: deque(maxlen=1000))
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=1000))
    behind: deque[int] = field(default_factory=lambda: deque(maxlen=1000))

    def as_dict(self) -> dict[str, Any]:
        """Return the attributes by name, for JSON."""
        return {name: list(value) if isinstance(value, deque) else value for name, value in vars(self).items()}


class Puller(Agent):
    """One rank's pulls."""

    def __init__(self, context: Context, ranks: Sequence[int], number: int, algorithm: ScheduledPull) -> None:
        super().__init__(context, ranks, number)
        place = self._place_of[context.rank]
        self._schedule = algorithm.schedule_of(place, len(self._ranks))
        manages = algorithm.managed and place == algorithm.manager
        self._manager = algorithm.manager_of(len(self._ranks)) if manages else None
        self._patience = algorithm.patience
        self._snapshots: SnapshotStore | None = None
        self._pull: CorePull | None = None  # that is armed, under way or done in this window
        self._pulled = self._skipped = False  # the pull is done, and the schedule knows; there is none
        self._began, self._lasts = 0.0, math.inf  # this window
        self.failed = 0

    def use(self, snapshots: SnapshotStore) -> None:
        """Pull to and from these snapshots."""
        self._snapshots = snapshots

    # ---- the thread that trains calls these --------------------------------------------------------------------

    def begin_window(self, lasts: float) -> None:
        """Begin the steps of a window, which are expected to take so many seconds (infinity: not known)."""
        with self.lock:
            self._check()
            now = self.now()
            self._pull, self._pulled, self._skipped, self._began, self._lasts = None, False, False, now, lasts
            self._carry_out(now, self._schedule.window(now, now + lasts))

    def end_window(self) -> CorePull | None:
        """Wait for the pull of this window, and return it; None if there is nobody to pull from."""
        with self.lock:
            self._check()
            now = self.now()
            self._carry_out(now, self._settle(now))
            self._note_beginning(now)
            self._carry_out(now, self._schedule.ended(now))
        self.wait()
        with self.lock:
            return self._pull

    # ---- Agent -----------------------------------------------------------------------------------------------

    def _is_over(self) -> bool:
        return self._skipped or self._pulled

    def _act(self, now: float, action: Any) -> None:
        assert self._snapshots is not None
        if isinstance(action, Skip):
            self._pull, self._skipped = None, True
        elif isinstance(action, Pull):
            if self._pull is not None:
                self._snapshots.cancel(self._pull)
            start = time.monotonic() + action.start - now  # the core begins pulls by that clock
            self._pull = self._snapshots.pull(self._ranks[action.peer], start)
            self._due = max(now, action.start) + self._patience

    def _heard(self, now: float, sender: int, message: Message) -> Iterable[Any]:
        if self._manager is not None and message[0] in _TO_MANAGER:
            return self._manager.heard(now, sender, message)
        self._note_beginning(now)
        return self._schedule.heard(now, sender, message)

    def _note_beginning(self, now: float) -> None:
        """Tell the schedule once the pull has begun: what has begun is not moved any more."""
        if self._pull is not None and self._pull.state != "armed":
            self._schedule.began(now)

    def _lost(self, now: float, place: int) -> Iterable[Any]:
        actions = list(self._manager.lost(now, place)) if self._manager is not None else []
        return actions + self._schedule.lost(now, place)

    def _done(self, now: float, place: int, number: int, failure: str) -> Iterable[Any]:
        return self._settle(now) if self._pull is not None and self._pull.number == number else ()

    def _settle(self, now: float) -> Iterable[Any]:
        """Tell the schedule of a pull that has ended, whoever sees it first: this thread or the one that trains."""
        pull = self._pull
        if pull is None or self._pulled or pull.state not in ("done", "failed"):
            return ()
        place = self._place_of[pull.peer]
        if pull.state == "done":
            self._pulled = True
            return self._schedule.pulled(now, place, pull.seconds)
        self._pull = None
        self.failed += 1
        return self._schedule.failed(now, place)

    def _alarmed(self, now: float) -> Iterable[Any]:
        return self._schedule.alarm(now, self._began + self._lasts)

    def _deadline(self) -> float:
        return self._due if self._pull is not None and self._pull.state in ("armed", "under way") else math.inf

    def _overdue(self, now: float) -> Iterable[Any]:
        assert self._pull is not None and self._snapshots is not None
        place = self._place_of[self._pull.peer]
        self._snapshots.cancel(self._pull)
        self._pull = None
        self.failed += 1
        return self._schedule.failed(now, place)


class PullStrategy(ExchangingStrategy):
    """What makes the steps of an optimizer those of `ScheduledPull`."""

    algorithm: ScheduledPull
    _was_open = False
    _noted = 0  # pulls that a record has

    levels = False  # asynchronous ones are never where the others are
    takes_in_unfrozen = False

    def prepare(self) -> None:
        self._told = PullStatistics()
        self._windows: deque[float] = deque(maxlen=_WINDOWS)  # their seconds
        self._began: float | None = None

    def attach(self) -> None:
        everybody, context, algorithm = self.settings.process_set, self.context, self.algorithm
        ranks = everybody.ranks or []
        if algorithm.managed and algorithm.manager >= len(ranks):
            raise UsageError(f"{algorithm}: there is no rank {algorithm.manager} among {len(ranks)}")
        self._arena = ParameterBuffer(context, self.exchanged_names, self.exchanged, "model")
        self._mirror = Mirror(context, self._arena)
        number = service_numbers(context, everybody, 2)
        self._puller = Puller(context, ranks, number, algorithm)
        self._snapshots = SnapshotStore(context.world, number + 1, self._arena.layout, self._puller.mailbox)
        self._puller.use(self._snapshots)
        name = context.plan_name("snapshots", everybody.process_set_id)
        for rank, place in zip(ranks, allgather_object(self._snapshots.location, name=name, process_set=everybody)):
            if context.world.nodes[rank] == context.world.nodes[context.rank]:
                self._snapshots.connect(rank, place)
        context.world.outlive_peers()
        self._puller.start()
        context.on_shutdown[id(self)] = weakref.WeakMethod(self._close)
        weakref.finalize(self, self._puller.close)

    def _part(self, keeps_place: bool = False) -> None:
        told = self._told
        super()._part(keeps_place)
        self._told = told

    def renew(self) -> None:
        self._was_open |= self._began is not None
        super().renew()
        if self._was_open and self.active:
            self._open()  # here, where all ranks come
        self._was_open = False

    @property
    def statistics(self) -> PullStatistics:
        return self._told

    def noted(self) -> Mapping[str, Mapping[str, Any]]:
        told, before = self._told, self._noted
        self._noted = told.pulls
        new = min(told.pulls - before, len(told.ages))
        if new <= 0:
            return {}
        pulls = zip(list(told.ages)[-new:], list(told.behind)[-new:], list(told.seconds)[-new:])
        return {"ages": {"pulls": [list(pull) for pull in pulls]}}

    def _publish(self) -> None:
        self._mirror.take()
        self._publish_mirror()

    def _publish_mirror(self) -> None:
        self._snapshots.publish(self._mirror.address, self.steps)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._arena.adopt()
        self._open()

    def _open(self) -> None:
        """Meet the other ranks before the first step, whose parameters are the first that others may see.

        What a script does between wrapping the optimizer and training (broadcasting, loading) is over on all ranks.
        Collective the first time.
        """
        if self._began is None:
            self.settings.judge(self._arena.names, self._arena.tensors, together=True)
            self._publish()
            meet(self.context, self.settings.process_set)
            self._begin_window()

    def _begin_window(self) -> None:
        self._began = time.monotonic()
        self._puller.begin_window(statistics.median(self._windows) if self._windows else math.inf)

    def after_step(self) -> None:
        self._arena.adopt()
        self.settings.judge(self._arena.names, self._arena.tensors)
        self.steps += 1
        self._publish()
        if self.steps % self.algorithm.interval == 0:
            self._end_window()

    def _end_window(self) -> None:
        assert self._began is not None
        ended = time.monotonic()
        self._windows.append(ended - self._began)
        pull = self._puller.end_window()
        now, told = time.monotonic(), self._told
        told.windows += 1
        told.waited += now - ended
        if pull is not None:
            told.pulls += 1
            told.ages.append(pull.age + now - pull.begun)
            told.seconds.append(pull.seconds)
            told.behind.append(self.steps - pull.steps)
            self._snapshots.average(pull, self._mirror.address)
            self._mirror.give()
            self._publish_mirror()
        told.failed, told.messages, told.unpublished = (
            self._puller.failed,
            self._puller.told,
            self._snapshots.unpublished,
        )
        self._begin_window()

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
        if self._began is not None:
            self._arena.adopt()
            self._publish()

    def settle(self, optimizer: torch.optim.Optimizer) -> None:
        """Make sure that nobody waits for a pull when this rank closes: all have come here."""
        if self._met:
            meet(self.context, self.settings.process_set)

    def before_join(self) -> None:
        """Let others pull from this rank as before: nobody waits for its steps."""
        self._open()

    def _close(self) -> None:
        self._puller.close()
        self._snapshots.close()

    def detach(self) -> None:
        super().detach()
        self.context.on_shutdown.pop(id(self), None)
        if self._met:
            self._close()
