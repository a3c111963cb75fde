"""Virtual time for workers that do not wait for each other: SimPy, messages, deaths and the learning curve.

At equal times there happens first what was scheduled before, in that order; then steps end, in the order of the
workers' numbers; then what comes of all that at once; and last the curve gets its point.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from typing import Any

import simpy
from simpy.events import NORMAL, Event, EventPriority, Timeout

from sordino.runtime.actions import Message
from sordino.simulate.job import Job, Outcome, Progress
from sordino.simulate.problem import Problem, problem_of
from sordino.simulate.record import Record

Process = Generator[Event, Any, None]

_STEPS = 2  # priorities: SimPy's own are 0 and 1, the smallest is first
_AT_ONCE = 1 << 61
_LAST = 1 << 62
_WORD = 8  # bytes of a number, or a word, in a message of the scheduling


class _Late(Timeout):
    """A timeout with a priority of its own among events of the same time."""

    def __init__(self, clock: Clock, delay: float, priority: int) -> None:
        self.priority = priority
        super().__init__(clock, delay)


class Clock(simpy.Environment):
    """SimPy's, which knows that of equal times some come later."""

    def schedule(self, event: Event, priority: EventPriority = NORMAL, delay: float = 0) -> None:
        """Schedule an event as SimPy's environment does."""
        super().schedule(event, EventPriority(event.priority) if isinstance(event, _Late) else priority, delay)


class World(ABC):
    """All workers of a run. What algorithms differ in is `work`, a SimPy process, and what messages and deaths do."""

    def __init__(self, job: Job, progress: Progress) -> None:
        self.job = job
        self.clock = Clock()
        self.problem: Problem = problem_of(job)
        self.record = Record(job.workers, job.spans_until)
        self._progress = progress
        self._alive = [True] * job.workers
        self._running = job.workers
        self._steps = 0
        self._all_done = self.clock.event()

    # ---- what algorithms say ---------------------------------------------------------------------------------------

    @abstractmethod
    def work(self, worker: int) -> Process:
        """Do what a worker does until it has done its steps."""

    @abstractmethod
    def heard(self, sender: int, to: int, message: Message) -> None:
        """Take in a message that has come to a worker that is alive."""

    @abstractmethod
    def noticed(self, worker: int, dead: int) -> None:
        """Have a worker that is alive notice that another has died."""

    # ---- what they are offered -------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """Virtual seconds."""
        return float(self.clock.now)

    def alive(self, worker: int) -> bool:
        """Return whether a worker has not died."""
        return self._alive[worker]

    def at(self, time: float, call: Callable[..., None], *arguments: Any) -> None:
        """Call that function at that time (now, if it is past)."""

        def act(_: Event) -> None:
            call(*arguments)

        delay = time - self.now
        event = self.clock.timeout(delay) if delay > 0 else _Late(self.clock, 0.0, _AT_ONCE)
        assert event.callbacks is not None
        event.callbacks.append(act)

    def tell(self, sender: int, to: int, message: Message) -> None:
        """Send a message of the scheduling; a worker's to itself takes no time and no link."""
        if sender != to:
            self.record.sent(sender, _WORD * len(message))
        self.at(self.now + (self.job.links.latency if sender != to else 0.0), self._arrives, sender, to, message)

    def _arrives(self, sender: int, to: int, message: Message) -> None:
        if self._alive[to]:
            self.heard(sender, to, message)

    def transfer(self, sender: int, to: int) -> float:
        """Have a model begin to travel; return the seconds that it takes."""
        self.record.sent(sender, self.job.message_bytes)
        return self.job.links.seconds(sender, to, self.job.message_bytes)

    def compute(self, worker: int) -> Process:
        """Take one step: its gradient is that of the parameters at its beginning."""
        begin = self.now
        self.problem.gradient(worker)
        yield _Late(self.clock, float(self.job.compute[worker]), _STEPS + worker)
        if not self._alive[worker]:
            yield self.clock.event()  # which never comes
        self.problem.step(worker)
        self.record.computed(worker, begin, self.now)
        self._steps += 1
        if self._steps % self._often == 0:
            self._progress(min(self._part(), 1.0))

    def mean(self, worker: int) -> float:
        """Return the mean seconds of a step of this worker so far."""
        return float(self.record.computing[worker] / self.record.steps[worker])

    def finished(self, worker: int) -> bool:
        """Return whether the worker has done the steps that it is to do."""
        return self.job.steps is not None and self.record.steps[worker] >= self.job.steps

    # ---- the run ---------------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Run to the end."""
        self.record.evaluated(0.0, self.problem.evaluate())
        for worker, seconds in self.job.kills:
            self.at(seconds, self._dies, worker)
        for worker in range(self.job.workers):
            self.clock.process(self._worker(worker))
        self.clock.process(self._evaluate())
        limit = self.job.seconds
        self.clock.run(self._all_done if limit is None else _Late(self.clock, limit, _LAST + 1))
        if self.record.curve[-1]["time"] < self.now:
            self.record.evaluated(self.now, self.problem.evaluate())
        self._progress(1.0)
        return Outcome(self.record, self.now, self.problem.final())

    def _worker(self, worker: int) -> Process:
        yield from self.work(worker)
        self._leaves()

    def _leaves(self) -> None:
        self._running -= 1
        if self._running == 0:
            self._all_done.succeed()

    def _dies(self, worker: int) -> None:
        if not self._alive[worker]:
            return
        self._alive[worker] = False
        self.problem.leave(worker)
        if not self.finished(worker):
            self._leaves()
        self.at(self.now + self.job.links.latency, self._is_noticed, worker)

    def _is_noticed(self, dead: int) -> None:
        for worker in range(self.job.workers):
            if self._alive[worker]:
                self.noticed(worker, dead)

    def _evaluate(self) -> Process:
        for point in itertools.count(1):
            yield _Late(self.clock, point * self.job.horizon / self.job.points - self.now, _LAST)
            self.record.evaluated(self.now, self.problem.evaluate())
            self._progress(min(self._part(), 1.0))

    @property
    def _often(self) -> int:
        return max(1, 8 * self.job.workers)

    def _part(self) -> float:
        if self.job.steps is not None:
            return self._steps / (self.job.steps * self.job.workers)
        return self.now / self.job.horizon
