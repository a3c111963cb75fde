"""Strategy for AD-PSGD: steps on local gradients, while parameters are averaged with those of peers.

Averaging works on a copy of the parameters. A step applies to the parameters all changes that averagings have made to
the copy, steps the optimizer, and copies the parameters back. During a step no averaging touches the copy. Between
steps, averagings do not need the training thread, and the parameters do not change while gradients are computed.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from sordino._core import PairAveraging
from sordino.algorithms.adpsgd import ADPSGD
from sordino.algorithms.adpsgd.pairing import Average, Cancel
from sordino.algorithms.exchanging import ExchangingStrategy
from sordino.algorithms.strategy import Closure, Runtime
from sordino.errors import NonFinite
from sordino.runtime.context import Context
from sordino.runtime.exchange.actions import Message, Skip
from sordino.runtime.exchange.async_agent import Agent, meet, service_numbers, some_have
from sordino.runtime.exchange.flat_buffer import FlatBuffer, ParameterBuffer


@dataclass
class PairStatistics:
    """Counts and costs of the averagings of this rank.

    Attributes:
        averagings: averagings that it took part in, started by itself or by peers.
        begun: intervals at which it started an averaging.
        failed: averagings that failed.
        skipped: its own averagings that it skipped because no peer was free.
        messages: messages that it sent to find peers.
        waited: seconds that training has waited for averagings.
    """

    averagings: int = 0
    begun: int = 0
    failed: int = 0
    skipped: int = 0
    messages: int = 0
    waited: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the attributes by name, for JSON."""
        return dict(vars(self))


class Averager(Agent):
    """Agent that carries out the averagings of one rank."""

    def __init__(
        self, context: Context, ranks: Sequence[int], number: int, algorithm: ADPSGD, statistics: PairStatistics
    ) -> None:
        super().__init__(context, ranks, number)
        self._pairing = algorithm.pairing_of(self._place_of[context.rank], len(self._ranks))
        self._patience = algorithm.patience
        self._core: PairAveraging | None = None
        self._number: int | None = None  # number of the current averaging
        self._due = 0.0
        self._peer = -1
        self._becomes_free = False  # whether `wait` also waits for averagings that peers have started
        self.statistics = statistics

    def use(self, core: PairAveraging) -> None:
        """Set the core object that averages. Called once, before `start`."""
        self._core = core

    def begin(self) -> None:
        """Start an averaging with a random peer."""
        with self.lock:
            self._check()
            now = self.now()
            self.statistics.begun += 1
            self._carry_out(now, self._pairing.begin(now))

    @property
    def under_way(self) -> bool:
        """Whether the averaging that `begin` has started is still pending."""
        with self.lock:
            return self._pairing.under_way

    def decline(self) -> None:
        """Wait until this rank takes part in no averaging, and decline all questions from then on, until `accept`.

        Raises:
            SordinoError: the world or the agent thread has failed.
        """
        self._becomes_free = True
        try:
            while not self._pairing.declining:
                self.wait()
                with self.lock:  # a peer may have started another one
                    self._pairing.declining = self._is_over()
        finally:
            self._becomes_free = False

    def accept(self) -> None:
        """Accept questions again."""
        with self.lock:
            self._pairing.declining = False

    def _is_over(self) -> bool:
        return not self._pairing.under_way and (self._number is None or not self._becomes_free)

    def _act(self, now: float, action: Any) -> None:
        assert self._core is not None
        if isinstance(action, Average):
            self._number, self._peer, self._due = action.number, action.peer, now + self._patience
            self._core.begin(self._ranks[action.peer], action.number)
        elif isinstance(action, Cancel):
            self._number = None
            self._core.cancel()
        elif isinstance(action, Skip):
            self.statistics.skipped += 1

    def _heard(self, now: float, sender: int, message: Message) -> Iterable[Any]:
        return self._pairing.on_message(now, sender, message)

    def _lost(self, now: float, place: int) -> Iterable[Any]:
        return self._pairing.lost(now, place)

    def _done(self, now: float, place: int, number: int, failure: str) -> Iterable[Any]:
        if number != self._number:
            return ()
        self._number = None
        if not failure:
            self.statistics.averagings += 1
            return self._pairing.exchanged(now)
        self.statistics.failed += 1
        return self._pairing.failed(now, place)

    def _alarmed(self, now: float) -> Iterable[Any]:
        return self._pairing.alarm(now)

    def _deadline(self) -> float:
        return self._due if self._number is not None else float("inf")

    def _overdue(self, now: float) -> Iterable[Any]:
        assert self._core is not None
        self._number = None
        self._core.cancel()
        self.statistics.failed += 1
        return self._pairing.failed(now, self._peer)


class PairStrategy(ExchangingStrategy):
    """Strategy for `ADPSGD`."""

    algorithm: ADPSGD
    _was_open = False

    mean_after_loss = False  # asynchronous ranks are at different steps anyway
    takes_in_unfrozen = False

    def __init__(self, runtime: Runtime, algorithm: ADPSGD) -> None:
        self._statistics = PairStatistics()  # since the first meeting
        super().__init__(runtime, algorithm)

    def prepare(self) -> None:
        self._opened = False
        self._interval = self._began = 0  # intervals so far, and the interval in which the last averaging started

    def attach(self) -> None:
        workers, context, algorithm = self.settings.process_set, self.context, self.algorithm
        ranks = workers.ranks or []
        self._arena = ParameterBuffer(context, self.exchanged_names, self.exchanged, "model")
        # Averagings work on the host. Their changes reach parameters on a GPU with the next step.
        self._copy = FlatBuffer(context, self._arena.layout)
        self._before = FlatBuffer(context, self._arena.layout, self._arena.device)
        number = service_numbers(context, workers, 2)
        self._averager = Averager(context, ranks, number, algorithm, self._statistics)
        self._messages_before = self._statistics.messages  # messages of earlier agents, before a loss
        self._core = PairAveraging(
            context.world, number + 1, self._arena.layout, self._copy.address, self._averager.mailbox, self._copy.arena
        )
        self._averager.use(self._core)
        context.world.tolerate_losses()
        self._averager.start()
        context.callbacks.on_shutdown.add(self._close)
        weakref.finalize(self, self._averager.close)

    @property
    def statistics(self) -> PairStatistics:
        """Counts and costs of the averagings of this rank."""
        if self._met:
            self._count_messages()
        return self._statistics

    def _count_messages(self) -> None:
        self._statistics.messages = self._messages_before + self._averager.messages_sent

    # ---- the step ----------------------------------------------------------------------------------------------

    def renew(self) -> None:
        self._was_open |= self._opened
        super().renew()
        # `_open` is collective, and all remaining ranks call `renew`. Before the loss, only some may have completed it.
        if self.active and some_have(self.context, self.settings.process_set, self._was_open):
            self._open()
        self._was_open = False

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep averagings from changing the copy within the context.

        On entry the parameters take the values of the copy. On exit the copy takes the values of the parameters.
        """
        self._core.lock()
        try:
            self._take_in()
            yield
        finally:
            self._copy.copy_(self._arena)
            self._before.copy_(self._arena)
            self._core.unlock()
            self._averager.accept()

    @torch.no_grad()
    def _take_in(self) -> None:
        """Apply to the parameters the changes that averagings have made to the copy since the last step.

        If nothing else has changed the parameters meanwhile, they become equal to the copy, bit for bit.
        """
        for (_, mine), (_, before), (_, copy) in zip(self._arena.runs, self._before.runs, self._copy.runs):
            if torch.equal(mine, before):
                mine.copy_(copy)
            else:
                mine.add_(copy.to(mine.device)).sub_(before)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._arena.adopt()
        self._open()

    def _open(self) -> None:
        """Wait for the other ranks before the first step. Collective the first time.

        When it returns, all ranks have completed what precedes training (broadcasts, loading a checkpoint).
        """
        if not self._opened:
            self.settings.judge(self._arena.names, self._arena.tensors, together=True)
            for values in (self._copy, self._before):
                values.copy_(self._arena)
            meet(self.context, self.settings.process_set)
            self._opened = True

    def step_optimizer(self, optimizer: torch.optim.Optimizer, closure: Closure, synchronize: bool) -> Any:
        with self._alone():
            result = super().step_optimizer(optimizer, closure, synchronize)
            self._arena.adopt()
            try:
                self.settings.judge(self._arena.names, self._arena.tensors)
            except NonFinite:
                self._arena.copy_(self._copy)  # the copy still holds the values before the step
                raise
        return result

    def after_step(self) -> None:
        self.steps += 1
        if self.steps % self.algorithm.interval != 0:
            return
        overlap = self.algorithm.overlap
        self._interval += 1
        if self._averager.under_way and self._interval - self._began >= overlap:
            self._wait()
        if not self._averager.under_way:
            self._began = self._interval
            self._averager.begin()
        if overlap == 0:
            self._wait()
            with self._alone():
                pass

    def _wait(self) -> None:
        begin = time.monotonic()
        self._averager.wait()
        self._statistics.waited += time.monotonic() - begin

    def drain(self, optimizer: torch.optim.Optimizer) -> None:
        """Wait for the averaging that this rank has started, and apply its result."""
        if not self._opened:
            return
        self._arena.adopt()
        self._wait()
        with self._alone():
            pass

    def settle(self, optimizer: torch.optim.Optimizer) -> None:
        """Make sure that no rank waits for an averaging when this rank closes. Collective.

        After the meeting all ranks have completed the averagings that they started.
        """
        if self._met:
            self.drain(optimizer)
            meet(self.context, self.settings.process_set)
            self.drain(optimizer)
            self.level_frozen()

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        super().load_optimizer_state(optimizer, state)
        if self._opened:
            self._forget_averagings()

    def _forget_averagings(self) -> None:
        """Forget averagings since the last step, and take part in none before the next step.

        They used the model before the load, even if the peers have not loaded yet. A script loads its model before the
        optimizer.
        """
        self._arena.adopt()
        self._averager.decline()
        self._core.lock()
        try:
            self._copy.copy_(self._arena)
            self._before.copy_(self._arena)
        finally:
            self._core.unlock()

    def before_join(self) -> None:
        """Open this rank for averaging. Peers can average with it as before, because none waits for its steps."""
        self._open()
        self._averager.accept()

    def _close(self) -> None:
        self._averager.close()
        self._core.close()
        self._count_messages()

    def detach(self) -> None:
        super().detach()
        self.context.callbacks.on_shutdown.discard(self)
        if self._met:
            self._close()
