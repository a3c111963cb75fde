"""AD-PSGD in virtual time: every worker's `Pairing`, carried out.

An averaging begins when both sides know of it, and changes both when the models have travelled: each moves by half the
difference of what the two had when they began, so a step that one of them took meanwhile is not lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, cast

import simpy
from torch import Tensor

from sordino.algorithms.adpsgd import ADPSGD
from sordino.algorithms.adpsgd.pairing import Average, Cancel, Pairing, Step
from sordino.runtime.actions import Message, Skip, Tell, Wake, Warn
from sordino.simulate.events import Process, World
from sordino.simulate.job import Job, Progress


class _Engaged(NamedTuple):
    """One side of an averaging."""

    average: Average
    copy: Tensor
    copied: float


class _Worker:
    """What one worker is at."""

    __slots__ = ("engaged", "pairing", "ready", "wake")

    def __init__(self, pairing: Pairing) -> None:
        self.pairing = pairing
        self.engaged: _Engaged | None = None
        self.wake: Wake | None = None
        self.ready: simpy.Event | None = None  # for which it waits


class Averaging(World):
    """All workers of ADPSGD."""

    def __init__(self, job: Job, progress: Progress) -> None:
        self._algorithm = cast(ADPSGD, job.algorithm)
        super().__init__(job, progress)
        pairings = (self._algorithm.pairing_of(worker, job.workers) for worker in range(job.workers))
        self._workers = [_Worker(pairing) for pairing in pairings]

    def work(self, worker: int) -> Process:
        """Go through intervals; at the end of each an averaging begins, unless the last one is still under way."""
        mine = self._workers[worker]
        taken = 0  # intervals, by the averaging that is under way
        while True:
            for _ in range(self._algorithm.interval):
                yield from self.compute(worker)
                if self.finished(worker):
                    return
            taken += 1
            if mine.pairing.under_way and taken >= self._algorithm.overlap:
                yield from self._wait(worker)
            if not mine.pairing.under_way:
                taken = 0
                self._do(worker, mine.pairing.begin(self.now))
                if self._algorithm.overlap == 0:
                    yield from self._wait(worker)

    def _wait(self, worker: int) -> Process:
        mine, begin = self._workers[worker], self.now
        if mine.pairing.under_way:
            mine.ready = self.clock.event()
            yield mine.ready
            self.record.waited(worker, begin, self.now)

    def heard(self, sender: int, to: int, message: Message) -> None:
        """See `World`."""
        self._do(to, self._workers[to].pairing.heard(self.now, sender, message))

    def noticed(self, worker: int, dead: int) -> None:
        """See `World`."""
        mine = self._workers[worker]
        self._do(worker, mine.pairing.lost(self.now, dead))
        if mine.engaged is not None and mine.engaged.average.peer == dead:
            mine.engaged = None
            self._do(worker, mine.pairing.failed(self.now, dead))

    def _do(self, worker: int, steps: Iterable[Step]) -> None:
        mine = self._workers[worker]
        for step in steps:
            if isinstance(step, Tell):
                self.tell(worker, step.to, step.message)
            elif isinstance(step, Wake):
                mine.wake = step
                self.at(step.at, self._wakes, worker, step)
            elif isinstance(step, Average):
                self._engages(worker, step)
            elif isinstance(step, Cancel):
                mine.engaged = None
            elif isinstance(step, Warn):
                self.record.warned(step.text)
            else:
                assert isinstance(step, Skip)
        if mine.ready is not None and not mine.pairing.under_way:
            mine.ready.succeed()
            mine.ready = None

    def _wakes(self, worker: int, wake: Wake) -> None:
        mine = self._workers[worker]
        if mine.wake is wake and self.alive(worker):
            self._do(worker, mine.pairing.alarm(self.now))

    def _engages(self, worker: int, average: Average) -> None:
        mine, peer = self._workers[worker], average.peer
        mine.engaged = _Engaged(average, self.problem.values(worker).clone(), self.now)
        theirs = self._workers[peer].engaged
        if theirs is not None and theirs.average == Average(worker, average.number) and self.alive(peer):
            seconds = max(self.transfer(worker, peer), self.transfer(peer, worker))
            self.at(self.now + seconds, self._ends, worker, mine.engaged, theirs, self.now)

    def _ends(self, worker: int, mine: _Engaged, theirs: _Engaged, begin: float) -> None:
        peer = mine.average.peer
        sides = ((worker, mine, theirs), (peer, theirs, mine))
        if any(self._workers[one].engaged is not own or not self.alive(one) for one, own, _ in sides):
            return
        for one, own, other in sides:
            self.problem.values(one).add_(other.copy - own.copy, alpha=0.5)
            self.record.used(one, self.now - other.copied)
            self.record.received(one, own.average.peer, begin, self.now)
            self._workers[one].engaged = None
        for one, _, _ in sides:
            self._do(one, self._workers[one].pairing.exchanged(self.now))
