"""Scheduled pull gossip in virtual time: executes the actions of every worker's `Schedule` and of the manager.

A worker publishes its parameters after each step. A pull brings the parameters that the peer had published when the
pull began. Once the window and the pull are over, the worker takes the mean of the two models and begins the next
window. Pulls from one peer at the same time do not slow each other down, as in the simulator of wan-gossip-scheduling,
unless links are shared (see `sordino.simulate.sharing`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import cast

from torch import Tensor

from sordino.algorithms.scheduled_pull import ScheduledPull
from sordino.algorithms.scheduled_pull.manager import Manager
from sordino.algorithms.scheduled_pull.schedule import Action, Pull, Schedule
from sordino.runtime.exchange.actions import Message, Skip, Tell, Wake, Warn
from sordino.simulate.events import WAIT, Process, World
from sordino.simulate.job import Job, Progress

_FOR_MANAGER = ("ask", "done", "failed")


class _Worker:
    """State of one worker's window."""

    __slots__ = ("copied", "copy", "done", "end", "pull", "schedule", "under_way")

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.new_window(math.inf)

    def new_window(self, end: float) -> None:
        """Begin a window without a pull."""
        self.end = end
        self.pull: Pull | None = None
        self.under_way = False
        self.done = False
        self.copy: Tensor | None = None
        self.copied = 0.0  # time of copying


class Pulling(World):
    """Workers of ScheduledPull."""

    def __init__(self, job: Job, progress: Progress) -> None:
        self._algorithm = cast(ScheduledPull, job.algorithm)
        super().__init__(job, progress)
        schedules = (self._algorithm.schedule_of(worker, job.workers) for worker in range(job.workers))
        self._workers = [_Worker(schedule) for schedule in schedules]
        self._manager: Manager | None = self._algorithm.manager_of(job.workers) if self._algorithm.managed else None

    def work(self, worker: int) -> Process:
        """Go through windows of steps, and average between them."""
        mine = self._workers[worker]
        end = math.inf
        while True:
            mine.new_window(end)
            self._do(worker, mine.schedule.window(self.now, end))
            yield self._algorithm.interval
            if not mine.done:
                begin = self.now
                self._do(worker, mine.schedule.ended(begin))
                if not mine.done:
                    yield WAIT
                self.record.waited(worker, begin, self.now, -1 if mine.pull is None else mine.pull.peer)
            if mine.copy is not None:
                self.problem.values(worker).add_(mine.copy).mul_(0.5)
                self.record.used(worker, self.now - mine.copied)
            end = self.now + self._algorithm.interval * self.mean(worker)

    def on_message(self, sender: int, to: int, message: Message) -> None:
        if self._manager is not None and to == self._algorithm.manager and message[0] in _FOR_MANAGER:
            self._do(to, self._manager.on_message(self.now, sender, message))
        else:
            self._do(to, self._workers[to].schedule.on_message(self.now, sender, message))

    def on_alarm(self, worker: int) -> None:
        mine = self._workers[worker]
        self._do(worker, mine.schedule.alarm(self.now, mine.end))

    def on_death(self, worker: int, dead: int) -> None:
        mine = self._workers[worker]
        if self._manager is not None and worker == self._algorithm.manager:
            self._do(worker, self._manager.lost(self.now, dead))
        self._do(worker, mine.schedule.lost(self.now, dead))
        if mine.under_way and mine.pull is not None and mine.pull.peer == dead:
            self._fails(worker, mine.pull)

    def _do(self, worker: int, actions: Iterable[Action]) -> None:
        mine = self._workers[worker]
        for action in actions:
            if isinstance(action, Tell):
                self.tell(worker, action.to, action.message)
            elif isinstance(action, Pull):
                mine.pull = action
                self.at(action.start, self._begins, worker, action)
            elif isinstance(action, Wake):
                self.wake(worker, action.at)
            elif isinstance(action, Skip):
                self._is_over(worker)
            else:
                assert isinstance(action, Warn)
                self.record.warned(action.text)

    def _begins(self, worker: int, pull: Pull) -> None:
        mine = self._workers[worker]
        if mine.pull is not pull or not self.alive(worker):
            return
        mine.under_way = True
        mine.schedule.began(self.now)
        if not self.alive(pull.peer):
            self.at(self.now + self.job.links.latency, self._fails, worker, pull)
            return
        copy = self.problem.values(pull.peer).clone()
        self.transfer(pull.peer, worker, self._ends, worker, pull, copy, self.now)

    def _ends(self, worker: int, pull: Pull, copy: Tensor, begin: float) -> None:
        mine = self._workers[worker]
        if mine.pull is not pull or not mine.under_way or not self.alive(worker) or not self.alive(pull.peer):
            return
        mine.under_way, mine.copy, mine.copied = False, copy, begin
        self.record.received(worker, pull.peer, begin, self.now)
        self._do(worker, mine.schedule.pulled(self.now, pull.peer, self.now - begin))
        self._is_over(worker)

    def _fails(self, worker: int, pull: Pull) -> None:
        mine = self._workers[worker]
        if mine.pull is pull and mine.under_way and self.alive(worker):
            mine.pull, mine.under_way = None, False
            self._do(worker, mine.schedule.failed(self.now, pull.peer))

    def _is_over(self, worker: int) -> None:
        """Note that this window has its pull, or will not have one."""
        self._workers[worker].done = True
        self.resume(worker)
