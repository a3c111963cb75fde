"""Agent thread of an algorithm to which other ranks may send messages at any time.

The algorithm decides. The core moves bytes, on its own thread and without the interpreter. The agent thread connects
the two. It sleeps until one of these events, and then runs for some microseconds:

| event | method that returns the actions (`sordino.runtime.exchange.actions`) |
|---|---|
| a message from a rank of the process set | `_heard` |
| a rank of the process set left or died | `_lost` |
| the core has finished something, or failed at it | `_done` |
| the time of the last `Wake` | `_alarmed` |
| the time that `_deadline` returns | `_overdue` |
"""

from __future__ import annotations

import json
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from sordino._core import Handle, Mailbox
from sordino.errors import SordinoError, TransportError
from sordino.log import logger
from sordino.runtime.collectives.autograd import allreduce
from sordino.runtime.collectives.operation import Max
from sordino.runtime.context import Context
from sordino.runtime.devices import HOST
from sordino.runtime.exchange.actions import Message, Tell, Wake, Warn
from sordino.runtime.process_set import ProcessSet

_log = logger(__name__)
_IDLE_S = 60.0  # longest sleep


def service_numbers(context: Context, process_set: ProcessSet, count: int) -> int:
    """Return the first of `count` service numbers that no rank of a process set has used. Collective."""
    name = context.names.plan("service_numbers", process_set.process_set_id)
    mine = torch.tensor([context.internal.services], device=HOST)
    first = int(allreduce(mine, op=Max, name=name, process_set=process_set).item())
    context.internal.services = first + count
    return first


def meet(context: Context, process_set: ProcessSet) -> None:
    """Wait for all ranks of a process set. Collective."""
    name = context.names.plan("meet", process_set.process_set_id)
    allreduce(torch.zeros(1, dtype=torch.uint8, device=HOST), op=Max, name=name, process_set=process_set)


def some_have(context: Context, process_set: ProcessSet, mine: bool) -> bool:
    """Return whether `mine` is true on some rank of a process set. Collective."""
    name = context.names.plan("some have", process_set.process_set_id)
    flag = torch.tensor([float(mine)], device=HOST)
    return bool(allreduce(flag, op=Max, name=name, process_set=process_set).item())


def encode(message: Message) -> str:
    """Return a message as text."""
    return json.dumps(message)


def decode(text: str) -> Message:
    """Return the message in a text. Raises TransportError if the text is not a message."""
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):
        message = None
    if (
        not isinstance(message, list)
        or not message
        or not isinstance(message[0], str)
        or not all(type(number) in (int, float) for number in message[1:])
    ):
        raise TransportError(f"received a text that is not a message: {text[:80]!r}")
    return (message[0], *message[1:])


class Agent(ABC):
    """One rank's part of an asynchronous algorithm, and the thread that executes its decisions.

    Algorithms identify a rank by its place, its index in the process set. All methods that begin with an underscore
    are called with `lock` held.

    Args:
        context: the context of this rank.
        ranks: ranks of the process set, in order.
        number: number of the service, the same on all of these ranks.
    """

    def __init__(self, context: Context, ranks: Sequence[int], number: int) -> None:
        self._world = context.world
        self._ranks = list(ranks)
        self._place_of = {rank: place for place, rank in enumerate(self._ranks)}
        self.mailbox = Mailbox(context.world, number)
        self.lock = threading.RLock()
        self.messages_sent = 0
        """Number of messages that this rank has sent to other ranks."""
        self._alarm = float("inf")
        self._sleeps_until = float("inf")
        self._process = os.getpid()
        self._failure: Exception | None = None
        self._waiting: Handle | None = None
        self._closed = False
        self._thread = threading.Thread(target=_work, args=(weakref.ref(self), self.mailbox), daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread, and wait for its end. Idempotent."""
        if os.getpid() != self._process:
            return  # a forked child has no such thread, and a thread of the parent may hold the lock
        with self.lock:
            if self._closed:
                return
            self._closed = True
        self.mailbox.close()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def now(self) -> float:
        """Return the seconds of this rank's clock for deadlines, which does not run while the process is stopped."""
        return self._world.awake_seconds

    # ---- to be overridden by algorithms ------------------------------------------------------------------------

    @abstractmethod
    def _act(self, now: float, action: Any) -> None:
        """Execute an action that only some algorithms have."""

    @abstractmethod
    def _heard(self, now: float, sender: int, message: Message) -> Iterable[Any]:
        """Return the actions for a message from the rank at place `sender`."""

    @abstractmethod
    def _lost(self, now: float, place: int) -> Iterable[Any]:
        """Return the actions for a rank that has left or died."""

    @abstractmethod
    def _done(self, now: float, place: int, number: int, failure: str) -> Iterable[Any]:
        """Return the actions for an event "done" of the core. `failure` is "" on success."""

    @abstractmethod
    def _alarmed(self, now: float) -> Iterable[Any]:
        """Return the actions for the time of the last `Wake`."""

    @abstractmethod
    def _is_over(self) -> bool:
        """Return whether `wait` may return."""

    def _deadline(self) -> float:
        """Return the time, on the clock of `now`, at which `_overdue` is called."""
        return float("inf")

    def _overdue(self, now: float) -> Iterable[Any]:
        """Return the actions for something that has passed its deadline."""
        return ()

    # ---- event loop --------------------------------------------------------------------------------------------

    def _carry_out(self, now: float, actions: Iterable[Any]) -> None:
        for action in actions:
            if isinstance(action, Tell):
                self.messages_sent += action.to != self._place_of.get(self._world.rank)
                self.mailbox.send(self._ranks[action.to], encode(action.message))
            elif isinstance(action, Wake):
                self._alarm = action.at
            elif isinstance(action, Warn):
                _log.warning("%s", action.text, extra={"rank": self._world.rank})
            else:
                self._act(now, action)
        if self._waiting is not None and self._is_over():
            self._waiting.finish()
            self._waiting = None
        if min(self._alarm, self._deadline()) < self._sleeps_until:
            self._sleeps_until = -float("inf")  # one nudge is enough
            self.mailbox.nudge()

    def wait(self) -> None:
        """Wait until `_is_over()`.

        Only the training thread may call this, without holding `lock`.

        Raises:
            SordinoError: the world or the agent thread has failed.
        """
        with self.lock:
            self._check()
            if self._is_over():
                return
            promise = self._waiting = self._world.promise()
        promise.wait()
        with self.lock:
            self._check()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def next_time(self) -> float:
        """Return the time, on the clock of `now`, until which the thread may sleep if no event comes."""
        with self.lock:
            self._sleeps_until = min(self._alarm, self._deadline())
            return self._sleeps_until

    def take(self, events: Sequence[tuple[str, int, str, int]]) -> bool:
        """Handle these events, and the alarm and the deadline if they are due. Return False on failure."""
        with self.lock:
            try:
                for event in events:
                    self._carry_out(self.now(), self._answer(*event))
                now = self.now()
                if self._alarm <= now:
                    self._alarm = float("inf")
                    self._carry_out(now, self._alarmed(now))
                if self._deadline() <= now:
                    self._carry_out(now, self._overdue(now))
            except Exception as error:
                self.fail(error)
                return False
        return True

    def fail(self, error: Exception) -> None:
        """Stop with an error, which `wait` raises."""
        with self.lock:
            self._failure = error
            if self._waiting is not None:
                self._waiting.finish()
                self._waiting = None

    def _answer(self, event: str, rank: int, text: str, number: int) -> Iterable[Any]:
        now, place = self.now(), self._place_of.get(rank, -1)
        if event == "message" and place >= 0:
            return self._heard(now, place, decode(text))
        if event == "lost" and place >= 0:
            return self._lost(now, place)
        if event == "done":
            return self._done(now, place, number, text)
        return ()


def _work(reference: weakref.ref[Agent], mailbox: Mailbox) -> None:
    """Run the agent thread.

    It holds no reference to the agent while it sleeps, so that an unused agent can be collected.
    """
    going = True
    while going:
        agent = reference()
        if agent is None:
            return
        sleep = agent.next_time() - agent.now()
        del agent
        events: list[tuple[str, int, str, int]] = []
        failure: SordinoError | None = None
        try:
            events = mailbox.wait(max(0.0, min(sleep, _IDLE_S)))
        except SordinoError as error:
            failure = error
        agent = reference()
        if agent is not None and failure is not None:
            agent.fail(failure)
        going = agent is not None and failure is None and agent.take(events)
        del agent
    mailbox.close()
