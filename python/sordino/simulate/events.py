"""Virtual time for workers that do not wait for each other: SimPy, messages, deaths and the learning curve.

At equal times there happens first what was scheduled before, in that order, and whoever waited for it goes on; then
steps end, in the order of the workers' numbers; then what comes of all that at once; and last the curve gets its point.
Steps that begin or end at one time are one call of the problem.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable
from typing import Any

import numpy as np
from simpy.events import NORMAL, Event

from sordino.runtime.actions import Message
from sordino.simulate.clock import Clock, Late, cycles_are_rare
from sordino.simulate.job import Job, Outcome, Progress
from sordino.simulate.problem import Problem, problem_of
from sordino.simulate.record import Record, rows_of
from sordino.simulate.sharing import Sharing

Process = Generator[int, None, None]
"""What a worker does: yields how many steps it takes next, or `WAIT`."""

WAIT = 0
"""Until `World.goes_on` is called."""

_STEPS, _AT_ONCE, _LAST, _END = 2, 3, 4, 5  # priorities
_WORD = 8  # bytes of a number, or a word, in a message of the scheduling

_Call = tuple[Callable[..., None], tuple[Any, ...]]


class World(ABC):
    """All workers of a run. What algorithms differ in is `work`, and what messages, alarms and deaths do."""

    def __init__(self, job: Job, progress: Progress) -> None:
        self.job = job
        self.clock = Clock()
        self.problem: Problem = problem_of(job)
        self.record = Record(job.workers, job.spans_until)
        self._progress = progress
        self._seconds: list[float] = job.compute.tolist()  # of a step
        self._alive = [True] * job.workers
        self._running = job.workers
        self._steps = self._told = 0  # by all; when progress was told last
        self._all_done = self.clock.event()
        self._processes: list[Process] = []
        self._began = np.zeros(job.workers)  # when the step of each did
        self._left = [0] * job.workers  # steps until the process of each is asked again
        self._starting: list[int] = []  # whose next step begins now
        self._waiting: set[int] = set()
        self._ready: list[int] = []  # who has waited, in the order in which they go on
        self._sharing = Sharing(job.links) if job.sharing == "fair" else None
        self._rates = 0  # how often they have been found anew
        self._dividing = False  # whether they will be, now
        self._wakes: list[tuple[list[_Call | None], int] | None] = [None] * job.workers  # a list of calls, and where

    # ---- what algorithms say ---------------------------------------------------------------------------------------

    @abstractmethod
    def work(self, worker: int) -> Process:
        """Do what a worker does, without end; it is asked for more until the worker has done its steps.

        It changes only what is this worker's, for others whose steps have ended may not have been asked yet.
        """

    @abstractmethod
    def heard(self, sender: int, to: int, message: Message) -> None:
        """Take in a message that has come to a worker that is alive."""

    @abstractmethod
    def woken(self, worker: int) -> None:
        """Take in that the time that `wake` was told has come; the worker is alive."""

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
        self._calls(time).append((call, arguments))

    def wake(self, worker: int, time: float) -> None:
        """Call `woken` at that time, and not at the one said before."""
        before = self._wakes[worker]
        if before is not None:
            calls, place = before
            calls[place] = None  # nothing is kept for it: it may be far in the future, and there may be many
        calls = self._calls(time)
        self._wakes[worker] = calls, len(calls)
        calls.append((self._wakes_up, (worker,)))

    def goes_on(self, worker: int) -> None:
        """Have the worker go on after what happens now, if it waits."""
        if worker in self._waiting:
            self._waiting.discard(worker)
            self._ready.append(worker)

    def tell(self, sender: int, to: int, message: Message) -> None:
        """Send a message of the scheduling; a worker's to itself takes no time and no link."""
        if sender != to:
            self.record.sent(sender, to, _WORD * len(message))
        self.at(self.now + (self.job.links.latency if sender != to else 0.0), self._arrives, sender, to, message)

    def transfer(self, sender: int, to: int, call: Callable[..., None], *arguments: Any) -> None:
        """Have a model begin to travel, and call that function when it is there."""
        count = self.job.message_bytes
        self.record.sent(sender, to, count)
        if self._sharing is None:
            self.at(self.now + self.job.links.seconds(sender, to, count), call, *arguments)
        else:
            self._sharing.begin(self.now, sender, to, count, (call, arguments))
            self._divides()

    def mean(self, worker: int) -> float:
        """Return the mean seconds of a step of this worker so far."""
        return float(self.record.computing[worker] / self.record.steps[worker])

    def finished(self, worker: int) -> bool:
        """Return whether the worker has done the steps that it is to do."""
        return self.job.steps is not None and bool(self.record.steps[worker] >= self.job.steps)

    # ---- calls -----------------------------------------------------------------------------------------------------

    def _calls(self, time: float) -> list[_Call | None]:
        """Return those that are due at that time (now, if it is past)."""
        delay = time - self.now
        if delay > 0:
            return self.clock.due(delay, NORMAL, self._happen)
        return self.clock.due(0.0, _AT_ONCE, self._happen_now)

    def _happen(self, calls: Iterable[_Call | None]) -> None:
        for due in calls:
            if due is not None:
                call, arguments = due
                call(*arguments)
        self._resume()

    def _happen_now(self, calls: Iterable[_Call | None]) -> None:
        for due in calls:
            self._happen((due,))  # whoever goes on does so before the next call

    def _wakes_up(self, worker: int) -> None:
        self._wakes[worker] = None
        if self._alive[worker]:
            self.woken(worker)

    def _divides(self) -> None:
        """Have rates found anew when all that happens at this time has."""
        if not self._dividing:
            self._dividing = True
            self.at(self.now, self._divide)

    def _divide(self) -> None:
        assert self._sharing is not None
        self._dividing = False
        self._rates += 1
        end = self._sharing.divide(self.now)
        if end is not None:
            self.at(end, self._has_left, self._rates)

    def _has_left(self, rates: int) -> None:
        """Have what has left arrive after the latency, unless rates have changed since its end was foreseen."""
        if rates == self._rates and self._sharing is not None:
            latency = self.job.links.latency
            for call, arguments in self._sharing.ended(self.now):
                if latency > 0:
                    self.at(self.now + latency, call, *arguments)
                else:
                    call(*arguments)
            self._divides()

    def _arrives(self, sender: int, to: int, message: Message) -> None:
        if self._alive[to]:
            self.heard(sender, to, message)

    # ---- steps -----------------------------------------------------------------------------------------------------

    def _resume(self) -> None:
        """Have everybody go on that is ready, and begin the steps that follow."""
        if self._ready:
            ready, self._ready = self._ready, []
            for worker in ready:
                self._ask(worker)
            self._begin_steps()

    def _ask(self, worker: int) -> None:
        """Ask a worker's process what it does next."""
        steps = next(self._processes[worker])
        if steps == WAIT:
            self._waiting.add(worker)
        else:
            if self.job.steps is not None:
                steps = min(steps, self.job.steps - int(self.record.steps[worker]))
            self._left[worker] = steps
            self._starting.append(worker)

    def _begin_steps(self) -> None:
        """Begin the steps of all that start; gradients are those of the parameters at the beginning."""
        workers, self._starting = self._starting, []
        if workers:
            self.problem.gradient(workers)
            self._began[rows_of(workers)] = self.now
            for seconds, same in itertools.groupby(workers, self._seconds.__getitem__):
                self.clock.due(seconds, _STEPS, self._end_steps).extend(same)

    def _end_steps(self, workers: list[int]) -> None:
        """End steps. Others follow at once, or what the workers do after those that their processes have asked for."""
        workers = [worker for worker in workers if self._alive[worker]]
        if not workers:
            return
        workers.sort()
        self.problem.step(workers)
        rows = rows_of(workers)
        self.record.computed(rows, self._began[rows], self.now)
        left, starting = self._left, self._starting
        for worker in workers:
            left[worker] -= 1
            if left[worker]:
                starting.append(worker)
            elif self.finished(worker):
                self._leaves()
            else:
                self._ask(worker)
        self._begin_steps()
        self._steps += len(workers)
        if self._steps >= self._told + 8 * self.job.workers:
            self._told = self._steps
            self._progress(min(self._part(), 1.0))

    # ---- the run ---------------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Run to the end."""
        self.record.evaluated(0.0, self.problem.evaluate())
        for worker, seconds in self.job.kills:
            self.at(seconds, self._dies, worker)
        self._processes = [self.work(worker) for worker in range(self.job.workers)]
        self._ready = list(range(self.job.workers))
        self._resume()
        self.clock.process(self._evaluate())
        limit = self.job.seconds
        with cycles_are_rare():
            self.clock.run(self._all_done if limit is None else Late(self.clock, limit, _END))
        if self.record.curve[-1]["time"] < self.now:
            self.record.evaluated(self.now, self.problem.evaluate())
        self._progress(1.0)
        return Outcome(self.record, self.now, self.problem.final())

    def _leaves(self) -> None:
        self._running -= 1
        if self._running == 0:
            self._all_done.succeed()

    def _dies(self, worker: int) -> None:
        if not self._alive[worker]:
            return
        self._alive[worker] = False
        self.problem.leave(worker)
        if self._sharing is not None:
            self._sharing.drop(worker)
            self._divides()
        if not self.finished(worker):
            self._leaves()
        self.at(self.now + self.job.links.latency, self._is_noticed, worker)

    def _is_noticed(self, dead: int) -> None:
        for worker in range(self.job.workers):
            if self._alive[worker]:
                self.noticed(worker, dead)

    def _evaluate(self) -> Generator[Event, None, None]:
        for point in itertools.count(1):
            yield Late(self.clock, point * self.job.horizon / self.job.points - self.now, _LAST)
            self.record.evaluated(self.now, self.problem.evaluate())
            self._progress(min(self._part(), 1.0))

    def _part(self) -> float:
        if self.job.steps is not None:
            return self._steps / (self.job.steps * self.job.workers)
        return self.now / self.job.horizon
