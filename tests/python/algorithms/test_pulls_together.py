"""Scheduled pulls of all workers together, in virtual time, with workers that die and with any speeds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sordino.algorithms.scheduled_pull import ScheduledPull
from sordino.algorithms.scheduled_pull.schedule import update_time
from sordino.runtime.exchange.actions import Message
from sordino.simulate.job import Job, Outcome
from sordino.simulate.links import Links
from sordino.simulate.pulling import Pulling
from sordino.simulate.record import Record

PATIENCE = 1.0


class Watched(Pulling):
    """World that notes each worker's pull in flight, and conflicts: two pulls from one worker at once."""

    def __init__(self, job: Job) -> None:
        super().__init__(job, lambda _: None)
        self.pulls: dict[int, tuple[int, float]] = {}  # by puller
        self.conflicts: list[float] = []  # their times

    def transfer(self, sender: int, to: int, call: Callable[..., None], *arguments: Any) -> None:
        super().transfer(sender, to, call, *arguments)
        seconds = self.job.links.seconds(sender, to, self.job.message_bytes)
        others = [
            peer for puller, (peer, end) in self.pulls.items() if self.alive(puller) and puller != to and end > self.now
        ]
        self.conflicts += [self.now] * (sender in others)
        self.pulls[to] = sender, self.now + seconds


def together(
    algorithm: ScheduledPull,
    compute: list[float],
    gbps: list[float],
    latency: float,
    kills: tuple[tuple[int, float], ...] = (),
    seconds: float = 1.5,
) -> tuple[Outcome, Watched]:
    job = Job(
        algorithm, len(compute), Links(gbps, latency), np.array(compute), 2.0**20,
        seconds=seconds, data="none", points=1, kills=kills,
    )  # fmt: skip
    world = Watched(job)
    return world.run(), world


@given(
    st.sampled_from(["manager", "autonomous"]),
    st.lists(st.tuples(st.sampled_from([5e-3, 0.02]), st.sampled_from([0.1, 1.0, 10.0])), min_size=2, max_size=7),
    st.sampled_from([0.0, 1e-3, 0.02]),
    st.integers(0, 1000),
    st.data(),
)
def test_nobody_is_pulled_from_twice_at_once_and_all_others_go_on(
    schedule: str, workers: list[tuple[float, float]], latency: float, seed: int, data: st.DataObject
) -> None:
    killed = data.draw(st.lists(st.integers(0, len(workers) - 1), max_size=len(workers) - 1, unique=True))
    kills = tuple((worker, data.draw(st.floats(0.01, 1.0))) for worker in killed)
    compute, gbps = [one[0] for one in workers], [one[1] for one in workers]
    algorithm = ScheduledPull(interval=4, schedule=schedule, seed=seed, patience=0.5)  # type: ignore[arg-type]
    outcome, world = together(algorithm, compute, gbps, latency, kills)
    record = outcome.record
    alive = [worker for worker in range(len(workers)) if worker not in killed]
    died = dict(kills).get(0, math.inf) if schedule == "manager" else math.inf
    # No other worker knows the pulls that the manager granted before it died.
    last = died + 4 * max(compute) + 8 * 2**20 / 1e8 + latency
    assert [time for time in world.conflicts if not died <= time <= last] == []
    slowest = max(world.job.links.seconds(i, j, 2**20) for i in alive for j in range(len(workers)))
    for worker in alive:
        # A window takes its steps and its own pull. While all others are taken, it also takes their pulls and requests.
        # Each death costs the time to notice it.
        window = 4 * compute[worker] + (len(workers) + 1) * (slowest + 10 * latency)
        assert record.steps[worker] >= 4 * int(1.5 / window) - 4
        if len(alive) > 1 and not kills:
            assert record.pulls[worker] >= record.steps[worker] // 4 - 1
    missed = schedule == "manager" and 0 in killed
    assert missed or record.warnings == []
    if missed and len(alive) > 1:
        assert any(text.startswith("rank 0, which schedules the pulls, is gone") for text in record.warnings)


def test_a_node_that_falls_silent_and_comes_back_is_pulled_from_again() -> None:
    class Silent(Watched):
        def _arrives(self, sender: int, to: int, message: Message) -> None:
            if not (0.5 <= self.now < 2.0 and 2 in (sender, to)):
                super()._arrives(sender, to, message)

    job = Job(
        ScheduledPull(interval=4, patience=0.1), 4, Links([1.0] * 4, 1e-3), np.full(4, 5e-3), 2.0**20,
        seconds=4.0, data="none", points=1, spans_until=4.0,
    )  # fmt: skip
    world = Silent(
        job,
    )
    pulls = [
        (span.begin, span.peer) for span in world.run().record.spans if span.activity == "transfer" and span.worker != 2
    ]
    assert any(begin < 0.5 and peer == 2 for begin, peer in pulls)
    assert not any(0.7 < begin < 2.0 and peer == 2 for begin, peer in pulls)
    assert sum(begin > 2.2 and peer == 2 for begin, peer in pulls) > 5


@pytest.mark.parametrize("schedule", ["manager", "autonomous"])
@pytest.mark.parametrize("wide", [0, 2, 6])
def test_pulls_end_with_their_windows_and_nobody_waits(schedule: str, wide: int) -> None:
    algorithm = ScheduledPull(interval=16, schedule=schedule)  # type: ignore[arg-type]
    job = Job(
        algorithm, 8, Links.wide(8, wide, 1.0, 10.0, 0.0), np.full(8, 10e-3), 3.5 * 2**20,
        seconds=0.16 * 60, data="none", points=1, spans_until=1e9,
    )  # fmt: skip
    record = Pulling(job, lambda _: None).run().record
    window = 16 * float(job.compute[0])
    measured: dict[tuple[int, int], float] = {}  # when a worker first knew the time of a pull from another
    on_time = 0
    for span in sorted(record.spans, key=lambda one: one.begin):
        if span.activity == "transfer":
            if span.begin > measured.setdefault((span.worker, span.peer), span.end) + window:
                assert min(abs(span.end - end) for end in ends_of(record, span.worker)) < 1e-9
                on_time += 1
        elif span.activity == "wait":
            assert span.begin < 30 * window
    assert on_time > 8 * 40
    assert record.pulls.min() >= 58


def ends_of(record: Record, worker: int) -> list[float]:
    """Return the ends of a worker's windows."""
    steps = [span.end for span in record.spans if span.worker == worker and span.activity == "compute"]
    return steps[15::16]


def test_with_latency_workers_with_a_manager_wait_only_in_the_first_windows() -> None:
    def waited(windows: int) -> list[float]:
        outcome, _ = together(ScheduledPull(schedule="manager"), [10e-3] * 8, [1.0] * 8, 5e-3, seconds=0.16 * windows)
        return outcome.record.waiting.tolist()

    assert waited(40) == waited(5)


def test_update_time_with_threshold_0_takes_what_was_measured() -> None:
    assert [update_time(4.0, measured, 0.0) for measured in (3.9, 4.0, 4.1)] == [3.9, 4.0, 4.1]
