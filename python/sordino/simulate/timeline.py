"""Virtual clocks of workers that step together, and the times at which their links become free.

A worker's link carries one transfer at a time in each direction. A transfer begins when its sender is ready and both
ends are free. It occupies both ends, also during its latency. A transfer that takes no time (no latency, infinite rate)
occupies nothing. A phase costs a few numpy operations for any number of workers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from sordino.simulate.job import Job
from sordino.simulate.phases import Floats, Integers, Phase, Rounds, Sends
from sordino.simulate.record import Record


class _Copies(NamedTuple):
    """Copies of parameters on their way: the receiver of each, and the time of copying."""

    targets: Integers
    copied: Floats


class _Awaited(NamedTuple):
    """Phases that have begun: the time at which each worker has their result, and the models in it."""

    arrived: Floats
    copies: list[_Copies]


class Timeline:
    """Virtual time of all workers.

    Attributes:
        clock: time at which each worker begins its next step, in seconds; float64 [workers].
        record: the record of the workers.

    Args:
        delay: see `sordino.simulate.traffic.StepMessages`.
    """

    def __init__(self, job: Job, record: Record, delay: int = 0) -> None:
        self.clock = np.zeros(job.workers)
        self.record = record
        self._job, self._delay = job, delay
        self._out, self._into = np.zeros(job.workers), np.zeros(job.workers)  # times at which links become free
        self._under_way: deque[_Awaited] = deque()  # exchanges that workers await after `delay` further ones
        self._steps = 0  # steps so far
        self._overlapping: deque[tuple[int, _Awaited]] = deque()  # with the step that awaits them

    def step(self, phases: Sequence[Phase]) -> None:
        """Let all workers compute, take part in the phases, and load their next batches."""
        done = self.clock + self._job.compute
        self.record.computed(slice(None), self.clock, done)
        ready = done
        delayed = self._delay > 0 and len(phases) > 0
        if delayed and len(self._under_way) == self._delay:
            ready = self._await(self._under_way.popleft(), ready)
        while self._overlapping and self._overlapping[0][0] <= self._steps:
            ready = self._await(self._overlapping.popleft()[1], ready)
        at_once = self._communicate([one for one in phases if one.overlap == 0 and not one.loading], ready)
        overlapping = [phase for phase in phases if phase.overlap > 0]
        if overlapping:
            end = self._communicate(overlapping, at_once.arrived)
            self._overlapping.append((self._steps + overlapping[0].overlap, end))
        self._steps += 1
        if delayed:
            self._under_way.append(at_once)
        else:
            ready = self._await(at_once, ready)
        self._waited(done, ready)
        self.clock = loaded = ready + self._job.load
        behind_loading = [phase for phase in phases if phase.loading]
        if behind_loading:
            self.clock = self._await(self._communicate(behind_loading, ready), loaded)
            self._waited(loaded, self.clock)

    # ---- phases ------------------------------------------------------------------------------------------------

    def _communicate(self, phases: Sequence[Phase], ready: Floats) -> _Awaited:
        """Let all workers take part in these phases, one after the other."""
        copies: list[_Copies] = []
        for phase in phases:
            if isinstance(phase, Sends):
                if phase.models:
                    copies.append(_Copies(phase.targets, ready[phase.sources]))
                ready = self._send(phase, ready)
            else:
                ready = self._go_round(phase, ready)
        return _Awaited(ready, copies)

    def _await(self, awaited: _Awaited, ready: Floats) -> Floats:
        """Return the time at which each worker, ready at these times, has the result and uses it."""
        ready = np.maximum(ready, awaited.arrived)
        record, workers = self.record, self._job.workers
        for targets, copied in awaited.copies:
            ages = ready[targets] - copied
            record.pulls += np.bincount(targets, minlength=workers)
            record.ages += np.bincount(targets, weights=ages, minlength=workers)
            record.oldest = max(record.oldest, float(ages.max(initial=0.0)))
        return ready

    def _send(self, phase: Sends, ready: Floats) -> Floats:
        """Return the time at which each worker has received its messages."""
        arrived, record = ready.copy(), self.record
        seconds = self._job.links.all_seconds(phase.sources, phase.targets, phase.bytes)
        ends = np.empty(len(seconds))
        for chosen in _without_conflict(phase.sources, phase.targets):
            sources, targets, takes = phase.sources[chosen], phase.targets[chosen], seconds[chosen]
            there, occupies = ready[sources], takes > 0
            free = np.maximum(self._out[sources], self._into[targets])
            end = np.where(occupies, np.maximum(there, free), there) + takes
            self._out[sources[occupies]] = end[occupies]
            self._into[targets[occupies]] = end[occupies]
            arrived[targets] = np.maximum(arrived[targets], end)
            ends[chosen] = end
        record.sent_all(phase.sources, phase.targets, np.broadcast_to(phase.bytes, len(seconds)))
        if self._kept(ends - seconds):
            spans = zip(phase.targets.tolist(), phase.sources.tolist(), (ends - seconds).tolist(), ends.tolist())
            for target, source, since, until in spans:
                record.received(target, source, since, until)
        return arrived

    def _go_round(self, phase: Rounds, ready: Floats) -> Floats:
        """Return the time at which the last round ends for each worker."""
        members, record = phase.members, self.record
        seconds = self._job.links.all_seconds(phase.sources, phase.targets, phase.bytes)
        takes = phase.rounds * seconds.max(axis=1)
        begin = ready[members].max(axis=1)
        free = np.maximum(self._out[members], self._into[members]).max(axis=1)
        begin = np.where(takes > 0, np.maximum(begin, free), begin)
        end = begin + takes
        arrived = ready.copy()
        arrived[members] = end[:, None]
        occupied = takes > 0
        self._out[members[occupied]] = self._into[members[occupied]] = end[occupied, None]
        sources, targets = phase.sources.ravel(), phase.targets.ravel()
        counts = np.broadcast_to(phase.bytes, phase.sources.shape).ravel()
        record.sent_all(sources, targets, counts, phase.rounds)
        if self._kept(begin):
            for row in range(len(members)):
                for source, target in zip(phase.sources[row], phase.targets[row]):
                    record.received(int(target), int(source), float(begin[row]), float(end[row]))
        return arrived

    # ---- the record --------------------------------------------------------------------------------------------

    def _kept(self, begin: Floats) -> bool:
        """Return whether the record keeps a span that begins at one of these times."""
        return bool((begin < self._job.spans_until).any())

    def _waited(self, begin: Floats, end: Floats) -> None:
        if self._kept(begin):
            for worker, (since, until) in enumerate(zip(begin.tolist(), end.tolist())):
                self.record.waited(worker, since, until)
        else:
            self.record.waiting += end - begin


def _without_conflict(sources: Integers, targets: Integers) -> Iterator[Integers]:
    """Yield indices of messages, in parts that have no two messages from one worker, or to one worker.

    The messages of each worker stay in order.
    """
    left = np.arange(len(sources))
    seen = np.empty(int(max(sources.max(initial=0), targets.max(initial=0))) + 1, np.int64)
    while len(left) > 0:
        first = np.ones(len(left), np.bool_)
        for ends in (sources[left], targets[left]):
            seen[ends[::-1]] = left[::-1]  # of several values written to one index, the last stays
            first &= seen[ends] == left
        yield left[first]
        left = left[~first]
