"""Engine for workers that do not wait for each other's steps: virtual time (SimPy), messages, deaths, learning curve.

Order of the events at one virtual time:

  1. calls scheduled before this time, in the order of scheduling; then the workers that these calls resume
  2. _STEPS: ends of steps, in the order of the workers' numbers
  3. _AT_ONCE: calls scheduled at this time without delay; the workers that a call resumes run before the next call
  4. _LAST: a point of the learning curve
  5. _END: the end of the run at `job.seconds`

A worker is a generator (`World.work`), which is asked for its next action when the previous one is complete:

  yields n      the worker takes n steps, one after the other, then is asked again
  yields WAIT   the worker waits until `resume` is called, then is asked again
  finished      it has taken `job.steps` steps; it is not asked again, but still handles messages
  dead          it has been killed; its step in progress has no effect, and it gets no more messages

Workers whose steps begin (or end) together share one call of `Problem.gradient` (or `Problem.step`).
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable
from typing import Any

import numpy as np
from simpy.events import NORMAL, Event

from sordino.runtime.exchange.actions import Message
from sordino.simulate.clock import Clock, Late, cycles_are_rare
from sordino.simulate.job import Job, Outcome, Progress
from sordino.simulate.problem import Problem, problem_of
from sordino.simulate.record import Record, rows_of
from sordino.simulate.sharing import Sharing

Process = Generator[int, None, None]
"""Program of a worker. It yields the number of steps to take next, or `WAIT`."""

WAIT = 0
"""Wait until `World.resume` is called."""

_STEPS, _AT_ONCE, _LAST, _END = 2, 3, 4, 5  # SimPy priorities; 1 is NORMAL
_WORD = 8  # bytes of a number or a word in a scheduling message

_Call = tuple[Callable[..., None], tuple[Any, ...]]


class World(ABC):
    """All workers of a run. Algorithms implement `work` and the handlers of messages, alarms and deaths."""

    def __init__(self, job: Job, progress: Progress) -> None:
        self.job = job
        self.clock = Clock()
        self.problem: Problem = problem_of(job)
        self.record = Record(job.workers, job.spans_until)
        self._progress = progress
        self._seconds: list[float] = job.compute.tolist()  # duration of a step, by worker
        self._alive = [True] * job.workers
        self._running = job.workers
        self._steps = self._reported_steps = 0  # steps of all workers; their number at the last progress report
        self._all_done = self.clock.event()
        self._processes: list[Process] = []
        self._began = np.zeros(job.workers)  # time at which each worker's step began
        self._left = [0] * job.workers  # steps of each worker until its generator is asked again
        self._starting: list[int] = []  # workers whose next step begins now
        self._waiting: set[int] = set()
        self._ready: list[int] = []  # workers that have waited, in the order in which they resume
        self._sharing = Sharing(job.links) if job.sharing == "fair" else None
        self._rates = 0  # how often the rates of transfers were computed
        self._dividing = False  # whether `_divide` is scheduled for this time
        self._wakes: list[tuple[list[_Call | None], int] | None] = [None] * job.workers  # alarm: its list, its index

    # ---- implemented by algorithms -----------------------------------------------------------------------------------

    @abstractmethod
    def work(self, worker: int) -> Process:
        """Return the program of a worker: an endless generator, which is asked until the worker has taken its steps.

        It must change only this worker's data, because workers whose steps end at the same time may not have been asked
        yet.
        """

    @abstractmethod
    def on_message(self, sender: int, to: int, message: Message) -> None:
        """Handle a message to a living worker."""

    @abstractmethod
    def on_alarm(self, worker: int) -> None:
        """Handle the alarm set by `wake`. The worker is alive."""

    @abstractmethod
    def on_death(self, worker: int, dead: int) -> None:
        """Tell a living worker that another worker has died."""

    # ---- called by algorithms ----------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """Virtual time, in seconds."""
        return float(self.clock.now)

    def alive(self, worker: int) -> bool:
        """Return whether a worker is alive."""
        return self._alive[worker]

    def at(self, time: float, call: Callable[..., None], *arguments: Any) -> None:
        """Call a function at a time, or now if that time is past."""
        self._calls(time).append((call, arguments))

    def wake(self, worker: int, time: float) -> None:
        """Set the worker's alarm to a time, instead of the time set before."""
        before = self._wakes[worker]
        if before is not None:
            calls, place = before
            calls[place] = None  # frees the call now: its time may be far ahead, and there are many alarms
        calls = self._calls(time)
        self._wakes[worker] = calls, len(calls)
        calls.append((self._wakes_up, (worker,)))

    def resume(self, worker: int) -> None:
        """Resume the worker after the current call, if it waits."""
        if worker in self._waiting:
            self._waiting.discard(worker)
            self._ready.append(worker)

    def tell(self, sender: int, to: int, message: Message) -> None:
        """Send a scheduling message. A message of a worker to itself takes no time and uses no link."""
        if sender != to:
            self.record.sent(sender, to, _WORD * len(message))
        self.at(self.now + (self.job.links.latency if sender != to else 0.0), self._arrives, sender, to, message)

    def transfer(self, sender: int, to: int, call: Callable[..., None], *arguments: Any) -> None:
        """Start the transfer of a model, and call a function when it has arrived."""
        count = self.job.message_bytes
        self.record.sent(sender, to, count)
        if self._sharing is None:
            self.at(self.now + self.job.links.seconds(sender, to, count), call, *arguments)
        else:
            self._sharing.begin(self.now, sender, to, count, (call, arguments))
            self._divides()

    def mean(self, worker: int) -> float:
        """Return the mean duration of this worker's steps so far, in seconds."""
        return float(self.record.computing[worker] / self.record.steps[worker])

    def finished(self, worker: int) -> bool:
        """Return whether the worker has taken all steps of the job."""
        return self.job.steps is not None and bool(self.record.steps[worker] >= self.job.steps)

    # ---- calls -------------------------------------------------------------------------------------------------------

    def _calls(self, time: float) -> list[_Call | None]:
        """Return the list of calls that are due at a time, or now if that time is past."""
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
            self._happen((due,))  # workers that this call resumes run before the next call

    def _wakes_up(self, worker: int) -> None:
        self._wakes[worker] = None
        if self._alive[worker]:
            self.on_alarm(worker)

    def _divides(self) -> None:
        """Compute the rates again, after the calls that are already scheduled for this time."""
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
        """Deliver transfers whose last byte has left, after the latency. Do nothing if the rates have changed."""
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
            self.on_message(sender, to, message)

    # ---- steps -------------------------------------------------------------------------------------------------------

    def _resume(self) -> None:
        """Resume all workers that are ready, and begin their next steps."""
        if self._ready:
            ready, self._ready = self._ready, []
            for worker in ready:
                self._ask(worker)
            self._begin_steps()

    def _ask(self, worker: int) -> None:
        """Ask a worker's generator for its next action."""
        steps = next(self._processes[worker])
        if steps == WAIT:
            self._waiting.add(worker)
        else:
            if self.job.steps is not None:
                steps = min(steps, self.job.steps - int(self.record.steps[worker]))
            self._left[worker] = steps
            self._starting.append(worker)

    def _begin_steps(self) -> None:
        """Begin the steps of all starting workers. A gradient uses the parameters at the beginning of its step."""
        workers, self._starting = self._starting, []
        if workers:
            self.problem.gradient(workers)
            self._began[rows_of(workers)] = self.now
            for seconds, same in itertools.groupby(workers, self._seconds.__getitem__):
                self.clock.due(seconds, _STEPS, self._end_steps).extend(same)

    def _end_steps(self, workers: list[int]) -> None:
        """End steps. The next step of a worker follows at once; after its last one its generator is asked again."""
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
        if self._steps >= self._reported_steps + 8 * self.job.workers:
            self._reported_steps = self._steps
            self._progress(min(self._part(), 1.0))

    # ---- the run -----------------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Run until all workers have finished or died, or until `job.seconds`."""
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
                self.on_death(worker, dead)

    def _evaluate(self) -> Generator[Event, None, None]:
        for point in itertools.count(1):
            yield Late(self.clock, point * self.job.horizon / self.job.points - self.now, _LAST)
            self.record.evaluated(self.now, self.problem.evaluate())
            self._progress(min(self._part(), 1.0))

    def _part(self) -> float:
        if self.job.steps is not None:
            return self._steps / (self.job.steps * self.job.workers)
        return self.now / self.job.horizon
