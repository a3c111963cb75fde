"""AD-PSGD in virtual time: executes the actions of every worker's `Pairing`.

An averaging begins when both workers have engaged in it, and ends when both models have arrived. Each worker then moves
by half the difference of the two models at the beginning. So a step that a worker took meanwhile is not lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast

from torch import Tensor

from sordino.algorithms.adpsgd import ADPSGD
from sordino.algorithms.adpsgd.pairing import Average, Cancel, Pairing, Step
from sordino.runtime.exchange.actions import Message, Skip, Tell, Wake, Warn
from sordino.simulate.events import WAIT, Process, World
from sordino.simulate.job import Job, Progress


class _Engaged(NamedTuple):
    """One side of an averaging: its peer and number, and a copy of the parameters with the time of copying."""

    average: Average
    copy: Tensor
    copied: float


class _Both:
    """Call of a function once both models have arrived."""

    __slots__ = ("_call", "_left")

    def __init__(self, call: Callable[..., None], *arguments: Any) -> None:
        self._call, self._left = (call, arguments), 2

    def one(self) -> None:
        """Note the arrival of one model."""
        self._left -= 1
        if self._left == 0:
            call, arguments = self._call
            call(*arguments)


class _Worker:
    """State of one worker."""

    __slots__ = ("engaged", "pairing")

    def __init__(self, pairing: Pairing) -> None:
        self.pairing = pairing
        self.engaged: _Engaged | None = None


class Averaging(World):
    """Workers of ADPSGD."""

    def __init__(self, job: Job, progress: Progress) -> None:
        self._algorithm = cast(ADPSGD, job.algorithm)
        super().__init__(job, progress)
        pairings = (self._algorithm.pairing_of(worker, job.workers) for worker in range(job.workers))
        self._workers = [_Worker(pairing) for pairing in pairings]

    def work(self, worker: int) -> Process:
        """Take intervals of steps. After each an averaging begins, unless the previous one is still in flight."""
        mine = self._workers[worker]
        taken = 0  # intervals since the averaging in flight began
        while True:
            yield self._algorithm.interval
            taken += 1
            if mine.pairing.under_way and taken >= self._algorithm.overlap:
                yield from self._wait(worker)
            if not mine.pairing.under_way:
                taken = 0
                self._do(worker, mine.pairing.begin(self.now))
                if self._algorithm.overlap == 0:
                    yield from self._wait(worker)

    def _wait(self, worker: int) -> Process:
        begin = self.now
        if self._workers[worker].pairing.under_way:
            yield WAIT
            self.record.waited(worker, begin, self.now)

    def on_message(self, sender: int, to: int, message: Message) -> None:
        self._do(to, self._workers[to].pairing.on_message(self.now, sender, message))

    def on_alarm(self, worker: int) -> None:
        self._do(worker, self._workers[worker].pairing.alarm(self.now))

    def on_death(self, worker: int, dead: int) -> None:
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
                self.wake(worker, step.at)
            elif isinstance(step, Average):
                self._engages(worker, step)
            elif isinstance(step, Cancel):
                mine.engaged = None
            elif isinstance(step, Warn):
                self.record.warned(step.text)
            else:
                assert isinstance(step, Skip)
        if not mine.pairing.under_way:
            self.resume(worker)

    def _engages(self, worker: int, average: Average) -> None:
        mine, peer = self._workers[worker], average.peer
        mine.engaged = _Engaged(average, self.problem.values(worker).clone(), self.now)
        theirs = self._workers[peer].engaged
        if theirs is not None and theirs.average == Average(worker, average.number) and self.alive(peer):
            ends = _Both(self._ends, worker, mine.engaged, theirs, self.now)
            self.transfer(worker, peer, ends.one)
            self.transfer(peer, worker, ends.one)

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
