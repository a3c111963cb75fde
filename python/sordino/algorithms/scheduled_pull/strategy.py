"""Strategy for scheduled pull gossip: steps on local gradients, and averages with pulled parameters.

The parameters are published as a snapshot after every step. After every window a worker takes the mean of its
parameters and a copy that it has pulled from one peer.

The schedule (schedule.py, negotiation.py) decides the peer and the time of a pull, and the thread of `Agent` carries
this out. Publishing is one copy. The core answers pulls, without any Python thread of this rank.
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
from sordino.algorithms.strategy import Runtime
from sordino.errors import UsageError
from sordino.runtime.collectives.objects import allgather_object
from sordino.runtime.context import Context
from sordino.runtime.exchange.actions import Message, Skip
from sordino.runtime.exchange.async_agent import Agent, meet, service_numbers, some_have
from sordino.runtime.exchange.flat_buffer import Mirror, ParameterBuffer

_TO_MANAGER = ("ask", "done", "failed")
_WINDOWS = 5  # last windows, whose median duration is the estimate for the next one


@dataclass
class PullStatistics:
    """Counts, ages and costs of the pulls of this rank.

    Attributes:
        windows: windows that have ended.
        pulls: pulls whose copy was averaged.
        failed: pulls that failed; another pull took the place of each.
        messages: messages sent for the scheduling.
        unpublished: steps after which no slot for a snapshot was free.
        waited: seconds that training has waited at the ends of windows.
        ages: ages of the averaged copies in seconds, for the last 1,000 pulls.
        seconds: durations of these pulls, in seconds.
        behind: steps of this rank minus steps of the peer when it published, for these pulls.
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
    """Agent that carries out the pulls of one rank."""

    def __init__(
        self,
        context: Context,
        ranks: Sequence[int],
        number: int,
        algorithm: ScheduledPull,
        statistics: PullStatistics,
    ) -> None:
        super().__init__(context, ranks, number)
        self._statistics = statistics
        place = self._place_of[context.rank]
        self._schedule = algorithm.schedule_of(place, len(self._ranks))
        manages = algorithm.managed and place == algorithm.manager
        self._manager = algorithm.manager_of(len(self._ranks)) if manages else None
        self._patience = algorithm.patience
        self._snapshots: SnapshotStore | None = None
        self._pull: CorePull | None = None  # this window's pull: armed, in flight or done
        self._pulled = self._skipped = False  # whether the schedule knows that the pull is done; whether there is none
        self._began, self._lasts = 0.0, math.inf  # start and expected duration of this window

    def use(self, snapshots: SnapshotStore) -> None:
        """Set the store of snapshots for all pulls. Called once, before `start`."""
        self._snapshots = snapshots

    # ---- the thread that trains calls these --------------------------------------------------------------------

    def begin_window(self, lasts: float) -> None:
        """Begin the steps of a window, which are expected to take `lasts` seconds (infinity: unknown)."""
        with self.lock:
            self._check()
            now = self.now()
            self._pull, self._pulled, self._skipped, self._began, self._lasts = None, False, False, now, lasts
            self._carry_out(now, self._schedule.window(now, now + lasts))

    def end_window(self) -> CorePull | None:
        """Wait for the pull of this window, and return it; None if there is no peer to pull from."""
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
            start = time.monotonic() + action.start - now  # the core uses the monotonic clock
            self._pull = self._snapshots.pull(self._ranks[action.peer], start)
            self._due = max(now, action.start) + self._patience

    def _heard(self, now: float, sender: int, message: Message) -> Iterable[Any]:
        if self._manager is not None and message[0] in _TO_MANAGER:
            return self._manager.on_message(now, sender, message)
        self._note_beginning(now)
        return self._schedule.on_message(now, sender, message)

    def _note_beginning(self, now: float) -> None:
        """Tell the schedule that the pull has begun, if it has, because it cannot be moved any more."""
        if self._pull is not None and self._pull.state != "armed":
            self._schedule.began(now)

    def _lost(self, now: float, place: int) -> Iterable[Any]:
        actions = list(self._manager.lost(now, place)) if self._manager is not None else []
        return actions + self._schedule.lost(now, place)

    def _done(self, now: float, place: int, number: int, failure: str) -> Iterable[Any]:
        return self._settle(now) if self._pull is not None and self._pull.number == number else ()

    def _settle(self, now: float) -> Iterable[Any]:
        """Tell the schedule that the pull has ended, once: the agent's and the training thread both call this."""
        pull = self._pull
        if pull is None or self._pulled or pull.state not in ("done", "failed"):
            return ()
        place = self._place_of[pull.peer]
        if pull.state == "done":
            self._pulled = True
            return self._schedule.pulled(now, place, pull.seconds)
        self._pull = None
        self._statistics.failed += 1
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
        self._statistics.failed += 1
        return self._schedule.failed(now, place)


class PullStrategy(ExchangingStrategy):
    """Strategy for `ScheduledPull`."""

    algorithm: ScheduledPull
    _was_open = False
    _noted = 0  # pulls that are in the run record

    mean_after_loss = False  # asynchronous ranks are at different steps anyway
    takes_in_unfrozen = False

    def __init__(self, runtime: Runtime, algorithm: ScheduledPull) -> None:
        self._statistics = PullStatistics()  # since the first meeting
        super().__init__(runtime, algorithm)

    def prepare(self) -> None:
        self._windows: deque[float] = deque(maxlen=_WINDOWS)  # durations in seconds
        self._began: float | None = None
        self._loaded_in_window = False

    def attach(self) -> None:
        workers, context, algorithm = self.settings.process_set, self.context, self.algorithm
        ranks = workers.ranks or []
        if algorithm.managed and algorithm.manager >= len(ranks):
            raise UsageError(f"{algorithm}: the manager must be one of the {len(ranks)} ranks")
        self._arena = ParameterBuffer(context, self.exchanged_names, self.exchanged, "model")
        self._mirror = Mirror(context, self._arena)
        number = service_numbers(context, workers, 2)
        counts = self._statistics
        self._before = counts.messages, counts.unpublished  # counts of earlier agents and stores, before a loss
        self._puller = Puller(context, ranks, number, algorithm, counts)
        self._snapshots = SnapshotStore(context.world, number + 1, self._arena.layout, self._puller.mailbox)
        self._puller.use(self._snapshots)
        name = context.names.plan("snapshots", workers.process_set_id)
        for rank, place in zip(ranks, allgather_object(self._snapshots.location, name=name, process_set=workers)):
            if context.world.nodes[rank] == context.world.nodes[context.rank]:
                self._snapshots.connect(rank, place)
        context.world.tolerate_losses()
        self._puller.start()
        context.callbacks.on_shutdown.add(self._close)
        weakref.finalize(self, self._puller.close)

    def renew(self) -> None:
        self._was_open |= self._began is not None
        super().renew()
        # `_open` is collective, and all remaining ranks call `renew`. Before the loss, only some may have completed it.
        if self.active and some_have(self.context, self.settings.process_set, self._was_open):
            self._open()
        self._was_open = False

    @property
    def statistics(self) -> PullStatistics:
        return self._statistics

    def noted(self) -> Mapping[str, Mapping[str, Any]]:
        counts, before = self._statistics, self._noted
        self._noted = counts.pulls
        new = min(counts.pulls - before, len(counts.ages))
        if new <= 0:
            return {}
        pulls = zip(list(counts.ages)[-new:], list(counts.behind)[-new:], list(counts.seconds)[-new:])
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
        """Publish the initial parameters and wait for all ranks, before the first step. Collective the first time.

        When it returns, all ranks have completed what precedes training (broadcasts, loading a checkpoint).
        """
        if self._began is None:
            self.settings.judge(self._arena.names, self._arena.tensors, together=True)
            self._publish()
            meet(self.context, self.settings.process_set)
            self._begin_window()

    def _begin_window(self) -> None:
        self._began, self._loaded_in_window = time.monotonic(), False
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
        if self._loaded_in_window:
            pull = None  # its values may be of the model before the load
        now, counts = time.monotonic(), self._statistics
        counts.windows += 1
        counts.waited += now - ended
        if pull is not None:
            counts.pulls += 1
            counts.ages.append(pull.age + now - pull.begun)
            counts.seconds.append(pull.seconds)
            counts.behind.append(self.steps - pull.steps)
            self._snapshots.average(pull, self._mirror.address)
            self._mirror.give()
            self._publish_mirror()
        self._count()
        self._begin_window()

    def _count(self) -> None:
        messages, unpublished = self._before
        self._statistics.messages = messages + self._puller.messages_sent
        self._statistics.unpublished = unpublished + self._snapshots.unpublished

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
        self._publish_loaded()

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        super().load_optimizer_state(optimizer, state)
        self._publish_loaded()

    def _publish_loaded(self) -> None:
        """Let peers pull the present parameters, which a script loads before the optimizer."""
        if self._began is not None:
            self._arena.adopt()
            self._publish()
            self._loaded_in_window = True

    def settle(self, optimizer: torch.optim.Optimizer) -> None:
        """Make sure that no rank waits for a pull when this rank closes. Collective: all ranks meet here."""
        if self._met:
            meet(self.context, self.settings.process_set)
            self.level_frozen()

    def before_join(self) -> None:
        """Open this rank for pulls. Peers can pull from it as before, because none waits for its steps."""
        self._open()

    def _close(self) -> None:
        self._puller.close()
        self._count()
        self._snapshots.close()

    def detach(self) -> None:
        super().detach()
        self.context.callbacks.on_shutdown.discard(self)
        if self._met:
            self._close()
