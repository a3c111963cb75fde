"""Goodput of a run whose workers fail: useful steps per second, relative to the same run without failures.

A worker fails after an exponentially distributed time of work (mean: MTBF), and works again R seconds later.

| way | effect of a failure | algorithms |
|---|---|---|
| restart | all workers stop for R seconds | those whose workers step together |
| continue | the worker is away for R seconds; workers that exchange with it pause once | those that survive losses |

A pause also delays workers that wait, directly or indirectly, for a worker that has paused. `share_of` computes the
mean delay: it advances the clocks of all workers by the messages of some steps, with and without the pause. So the cost
of a failure follows from the traffic and the traits of an algorithm alone.

All failures are then drawn in virtual time, one after the other. Between two of them nothing happens, so the time that
this takes depends neither on the MTBF nor on the seconds of a step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np

from sordino.simulate.job import Failures, Goodput, Job
from sordino.simulate.phases import Booleans, Phase, Sends
from sordino.simulate.record import Record
from sordino.simulate.timeline import Timeline
from sordino.simulate.traffic import StepMessages

_FAILURES = 20_000  # failures per result, so that its standard error is below 1 % of the lost part
_SETTLED, _STEADY = 1e-3, 3  # a delay has spread after _STEADY exchanges with a relative growth of at most _SETTLED
_FEW = 1000  # workers up to which the share is the mean over _PROBES failed workers
_PROBES = 3


def goodput_of(job: Job, messages: StepMessages, failures: Failures) -> Goodput:
    """Return the goodput of a job with failures. `messages` are those of its algorithm."""
    traits, seed = job.algorithm.traits, job.seed
    restart = after = None
    share = share_of(job, messages, failures.pause)
    if traits.synchronous:
        restart = drawn(job.workers, failures.mtbf, 0.0, failures.recover, seed)
    if traits.ends_with is None:
        after = drawn(job.workers, failures.mtbf, failures.recover, share * failures.pause, seed)
    return Goodput(restart, after, share)


def drawn(workers: int, mtbf: float, away: float, pause: float, seed: int) -> float:
    """Return the goodput over many failures that are drawn at random.

    Args:
        workers: number of workers.
        mtbf: mean seconds of work of a worker between two of its failures.
        away: seconds from a failure until the failed worker works again. Other workers do not wait for it.
        pause: seconds for which all workers stop at each failure.
        seed: seed of the draws.
    """
    generator = np.random.default_rng([seed, workers])
    returns: deque[float] = deque()  # times at which failed workers work again
    now = work = begin = before = 0.0  # work: worker-seconds
    working, count = workers, 0
    while count < _FAILURES:
        failure = now + generator.exponential(mtbf / working) if working else math.inf
        if returns and returns[0] <= failure:
            until = max(now, returns.popleft())
            work += working * (until - now)
            now, working = until, working + 1
            continue
        work += working * (failure - now)
        now = failure
        if away > 0:
            working -= 1
            returns.append(now + away)
        now += pause
        if now < 2 * away:  # at the beginning no worker is away yet
            begin, before = now, work
        else:
            count += 1
    return (work - before) / ((now - begin) * workers)


def share_of(job: Job, messages: StepMessages, pause: float) -> float:
    """Return the mean delay of all workers after a failure, as a fraction of the pause, from 0 to 1.

    The workers that exchange with the failed worker pause in the first step that has messages.
    """
    if job.workers == 1 or pause == 0:
        return 0.0
    generator = np.random.default_rng([job.seed, job.workers])
    failed = generator.integers(job.workers, size=_PROBES if job.workers <= _FEW else 1)
    return float(np.mean([_share(job, messages, pause, int(worker)) for worker in failed]))


def _share(job: Job, messages: StepMessages, pause: float, failed: int) -> float:
    first = messages.settled
    while not _has_messages(messages.phases(first, None)):
        first += 1
    phases = messages.phases(first, None)
    partners = _partners(phases, failed, job.workers)
    if not job.algorithm.traits.synchronous:  # no worker waits for the steps of another
        return float(partners.mean())
    lines = [Timeline(job, Record(job.workers), messages.delay) for _ in range(2)]
    lines[1].clock[partners] += pause
    share, steady = 0.0, 0
    for block in range(2 * math.ceil(math.log2(job.workers)) + messages.delay + _STEADY):
        for step in range(first + block * messages.period, first + (block + 1) * messages.period):
            phases = messages.phases(step, None)
            for line in lines:
                line.step(phases)
        before, share = share, float((lines[1].clock - lines[0].clock).mean()) / pause
        steady = steady + 1 if abs(share - before) <= _SETTLED * share else 0
        if steady == messages.delay + _STEADY:
            break
    return min(share, 1.0)


def _has_messages(phases: Sequence[Phase]) -> bool:
    return any(phase.sources.size > 0 for phase in phases)


def _partners(phases: Sequence[Phase], failed: int, workers: int) -> Booleans:
    """Return flags of the workers that wait for a message of the failed worker, or for its set; bool [workers]."""
    found = np.zeros(workers, np.bool_)
    for phase in phases:
        if isinstance(phase, Sends):
            found[phase.targets[phase.sources == failed]] = True
        else:
            found[phase.members[(phase.members == failed).any(axis=1)].ravel()] = True
    found[failed] = False
    return found
