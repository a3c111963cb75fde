"""`sordino simulate`: links, asynchronous workers in virtual time, and the command."""

from __future__ import annotations

import math
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sordino.algorithms import ADPSGD, ScheduledPull
from sordino.algorithms.scheduled_pull.schedule import Pull
from sordino.errors import UsageError
from sordino.simulate import averaging, events, pulling
from sordino.simulate.events import World
from sordino.simulate.images import Images
from sordino.simulate.job import Job
from sordino.simulate.links import Links, exact

BASE = ["simulate", "--algorithm"]


class Counting:
    """A problem in which each step adds 1 to the worker's own element, so that models show the steps in them."""

    def __init__(self, job: Job) -> None:
        self.size = job.workers
        self._values = torch.zeros(job.workers, job.workers)
        self.evaluations = 0

    parameter_bytes = 8

    def gradient(self, workers: list[int]) -> None:
        pass

    def step(self, workers: list[int]) -> None:
        self._values[workers, workers] += 1

    def leave(self, worker: int) -> None:
        pass

    def values(self, worker: int) -> Tensor:
        return self._values[worker]

    def evaluate(self) -> dict[str, float]:
        return {"distance": float(self._values.sum()), "consensus_distance": 0.0}

    def final(self) -> dict[str, float]:
        return {**self.evaluate(), "best_distance": 0.0}


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "problem_of", Counting)


def world(algorithm: ScheduledPull | ADPSGD, compute: list[float], links: Links, **others: Any) -> World:
    kind = pulling.Pulling if isinstance(algorithm, ScheduledPull) else averaging.Averaging
    job = Job(algorithm, len(compute), links, np.array(compute), 1e6, data="none", **{"points": 1, **others})
    return kind(job, lambda _: None)


# ---- links -----------------------------------------------------------------------------------------------------------


def test_links_are_as_fast_as_their_slower_end() -> None:
    links = Links.wide(4, 2, 1.0, 10.0, 5e-3)
    assert links.seconds(0, 1, 1e9) == pytest.approx(0.805)
    assert links.seconds(1, 2, 1e9) == links.seconds(2, 1, 1e9) == links.seconds(3, 2, 1e9) == pytest.approx(8.005)
    i, j = np.array([0, 1, 3]), np.array([1, 2, 2])
    assert links.all_seconds(i, j, 1e7).tolist() == [links.seconds(a, b, 1e7) for a, b in zip(i, j, strict=True)]
    assert Links([math.inf, math.inf], 0.0).seconds(0, 1, 1e9) == 0.0


def test_exact_durations_add_up_exactly() -> None:
    third = exact(1 / 3)
    assert abs(third - 1 / 3) < 1e-11
    total = 0.0
    for _ in range(1000):
        total += third
    assert total == 1000 * third


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "is not JSON"),
        ("[1]", "expected"),
        ('{"gbps": [1, 2, 3], "latency_ms": 1}', "3 numbers for 2 workers"),
        ('{"gbps": [1, 0], "latency_ms": 1}', "gbps: expected"),
        ('{"gbps": [1, "2"], "latency_ms": 1}', "gbps: expected"),
        ('{"gbps": [1, NaN], "latency_ms": 1}', "gbps: expected"),
        ('{"gbps": [1, 2], "latency_ms": -1}', "latency_ms: expected"),
        ('{"gbps": [1, 2]}', "expected"),
    ],
)
def test_files_of_links_that_are_wrong(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "links.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=complaint) as caught:
        Links.read(path, 2)
    assert str(path) in str(caught.value)


def test_files_of_links(tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    path.write_text('{"gbps": [1, Infinity], "latency_ms": 2}')
    links = Links.read(path, 2)
    assert (links.gbps.tolist(), links.latency) == ([1.0, math.inf], pytest.approx(2e-3))
    with pytest.raises(UsageError, match="cannot be read"):
        Links.read(tmp_path / "none.json", 2)


# ---- content and time of pulls ---------------------------------------------------------------------------------------


def test_a_naive_pull_brings_what_was_there_when_the_window_began(counting: None) -> None:
    run = world(ScheduledPull(interval=2, overlap="naive"), [0.1, 0.1], Links([1.0, 1.0], 0.0), steps=6)
    run.run()
    expected = np.zeros((2, 2))
    for window in range(3):
        before = expected.copy()
        expected += 2 * np.eye(2)
        expected = (expected + before[::-1]) / 2 if window < 2 else expected  # no window follows the last step
    assert [run.problem.values(worker).tolist() for worker in (0, 1)] == expected.tolist()


def test_without_overlap_a_pull_brings_what_was_there_when_the_window_ended(counting: None) -> None:
    links = Links([1.0, 1.0], 0.0)
    run = world(ScheduledPull(interval=2, overlap="none"), [0.1, 0.1], links, steps=6)
    record = run.run().record
    expected = np.zeros((2, 2))
    for window in range(3):
        expected += 2 * np.eye(2)
        expected = (expected + expected[::-1]) / 2 if window < 2 else expected
    assert [run.problem.values(worker).tolist() for worker in (0, 1)] == expected.tolist()
    assert record.waiting.tolist() == [2 * links.seconds(0, 1, 1e6)] * 2  # each for a transfer


def test_a_scheduled_pull_brings_steps_of_the_same_window(counting: None) -> None:
    # A transfer takes 0.03 s of a window of 4 x 0.1 s, so it contains all but the last step of the other worker.
    run = world(ScheduledPull(interval=4), [0.1, 0.1], Links([0.3, 0.3], exact(1 / 300)), steps=12)
    record = run.run().record
    assert record.waiting.tolist() == [0.0, 0.0]
    first = np.array([[4.0, 0.0], [0.0, 4.0]])
    first = (first + np.array([[0.0, 0.0], [0.0, 0.0]])) / 2  # no times were known: pulled at once
    copied = first[::-1] + 3 * np.eye(2)[::-1]
    second = (first + 4 * np.eye(2) + copied) / 2 + 4 * np.eye(2)
    assert [run.problem.values(worker).tolist() for worker in (0, 1)] == second.tolist()


def test_steps_that_end_together_come_in_the_order_of_workers_and_before_pulls(
    counting: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[int] = []
    monkeypatch.setattr(Counting, "step", lambda self, workers: order.extend(workers))
    tenth = exact(0.1)
    world(ScheduledPull(interval=99), [tenth, 2 * tenth, tenth], Links([1.0] * 3, 0.0), seconds=2 * tenth).run()
    assert order == [0, 2, 0, 1, 2]
    monkeypatch.undo()
    monkeypatch.setattr(events, "problem_of", Counting)
    # Pulls that take no time are equal to a round in lock-step: all copy before any averages.
    algorithm = ScheduledPull(interval=1, overlap="none", seed=3)
    run = world(algorithm, [0.1] * 3, Links([math.inf] * 3, 0.0), steps=6)
    run.run()
    schedules, expected = [algorithm.schedule_of(rank, 3) for rank in range(3)], np.zeros((3, 3))
    for step in range(6):
        expected += np.eye(3)
        if step < 5:
            pulls = [schedule.ended(0.0)[0] for schedule in schedules]
            expected = (expected + expected[[pull.peer for pull in pulls if isinstance(pull, Pull)]]) / 2
    assert [run.problem.values(worker).tolist() for worker in range(3)] == expected.tolist()


def test_pulls_change_nobody_but_the_puller(counting: None) -> None:
    # The second worker is much slower: the first pulls from it again and again while it computes its first step.
    run = world(ScheduledPull(interval=1, overlap="none"), [0.01, 1.0], Links([1.0, 1.0], 0.0), seconds=0.5)
    record = run.run().record
    assert record.pulls.tolist() == [record.steps[0] - 1, 0]  # the last one is not complete
    assert run.problem.values(1).tolist() == [0.0, 0.0]


def test_an_averaging_loses_no_step(counting: None) -> None:
    # Elements are sums of steps, halved and added: their sum over workers is the number of steps.
    compute = [0.03, 0.05, 0.02, 0.07]
    run = world(ADPSGD(interval=1, overlap=2), compute, Links([1.0, 0.5, 2.0, 1.0], 1e-3), seconds=3.0)
    record = run.run().record
    total = sum(run.problem.values(worker) for worker in range(4))
    assert isinstance(total, Tensor)
    assert total.tolist() == pytest.approx(record.steps.tolist(), abs=1e-3)
    assert record.pulls.min() > 10
    for worker in range(4):  # has a quarter of all workers' steps, except for the last ones
        assert run.problem.values(worker).tolist() == pytest.approx((record.steps / 4).tolist(), abs=8)


def test_an_averaging_without_overlap_is_waited_for(counting: None) -> None:
    links = Links([1.0, 1.0], 1e-3)
    record = world(ADPSGD(interval=4, overlap=0), [0.01, 0.01], links, steps=40).run().record
    # The two workers' questions cross. A yes takes the latency twice; then comes the transfer.
    assert record.waiting.max() >= 9 * (links.seconds(0, 1, 1e6) + links.latency)
    hidden = world(ADPSGD(interval=4, overlap=1), [0.01, 0.01], links, steps=40).run().record
    assert hidden.waiting.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("overlap", ["none", "naive"])
def test_pulls_that_meet_do_not_slow_each_other_down(overlap: Any, counting: None) -> None:
    links = Links([1.0] * 5, 0.0)
    record = (
        world(ScheduledPull(interval=4, overlap=overlap), [0.05] * 5, links, seconds=10.0, spans_until=99).run().record
    )
    took = {span.end - span.begin for span in record.spans if span.activity == "transfer"}
    assert took == {links.seconds(0, 1, 1e6)}
    assert record.oldest == pytest.approx(links.seconds(0, 1, 1e6) if overlap == "none" else 0.2)


def test_messages_and_bytes_are_counted(counting: None) -> None:
    record = world(ScheduledPull(interval=4, overlap="none"), [0.05] * 2, Links([1.0] * 2, 0.0), steps=20).run().record
    assert record.pulls.tolist() == record.messages.tolist() == [4, 4]
    assert record.bytes.tolist() == [4e6, 4e6]


def test_killed_workers_stop_and_the_others_go_on() -> None:
    kills = ((0, 0.5), (3, 0.7))
    links = Links.wide(6, 2, 1.0, 10.0, 1e-3)
    for algorithm in (
        ScheduledPull(interval=4, overlap="none"), ScheduledPull(interval=4, overlap="naive"),
        ScheduledPull(interval=4, schedule="manager"), ScheduledPull(interval=4), ADPSGD(interval=2),
    ):  # fmt: skip
        record = world(algorithm, [0.01] * 6, links, seconds=3.0, kills=kills).run().record
        assert record.steps[[0, 3]].max() <= 70
        assert record.steps[[1, 2, 4, 5]].min() > 150
        managed = isinstance(algorithm, ScheduledPull) and algorithm.managed
        assert [text.startswith("rank 0, which schedules the pulls, is gone") for text in record.warnings] == (
            [True] * len(record.warnings)
        )
        assert bool(record.warnings) == managed


def test_a_worker_that_dies_after_its_steps_was_done() -> None:
    """The others take all their steps: the dead worker does not count as one that still works."""
    for algorithm in (ADPSGD(interval=2), ScheduledPull(interval=4)):
        kills = ((0, 0.3), (1, 0.35))
        run = world(algorithm, [0.001, 0.001, 0.1, 0.1], Links([1.0] * 4, 0.0), steps=20, kills=kills)
        assert run.run().record.steps.tolist() == [20] * 4


@pytest.mark.parametrize("seed", range(4))
def test_who_was_pulled_from_by_the_dead_is_free_again(seed: int) -> None:
    algorithm = ScheduledPull(interval=2, schedule="manager", seed=seed)
    run = world(algorithm, [0.01] * 3, Links([1.0] * 3, 0.0), seconds=3.0, kills=((1, 0.516),))  # amid a pull
    record = run.run().record
    assert (record.steps[[0, 2]] >= 280).all()
    assert (record.pulls[[0, 2]] >= 135).all()


def test_of_the_times_to_wake_at_only_the_last_counts(counting: None, monkeypatch: pytest.MonkeyPatch) -> None:
    woken: list[tuple[int, float]] = []
    monkeypatch.setattr(pulling.Pulling, "on_alarm", lambda self, worker: woken.append((worker, self.now)))
    run = world(ScheduledPull(overlap="none"), [0.1, 0.1], Links([1.0, 1.0], 0.0), seconds=2.0)
    for worker, time in ((0, 0.25), (1, 0.25), (0, 1.0), (0, 0.5)):
        run.wake(worker, time)
    run.at(0.75, run.wake, 0, 1.0)
    run.run()
    assert woken == [(1, 0.25), (0, 0.5), (0, 1.0)]


def test_who_waits_goes_on_after_what_was_due_then_and_before_what_comes_of_it(
    counting: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def work(self: World, worker: int) -> events.Process:
        while True:
            yield events.WAIT
            order.append("goes on")

    monkeypatch.setattr(pulling.Pulling, "work", work)
    run = world(ScheduledPull(), [0.1], Links([1.0], 0.0), seconds=2.0)
    for name in ("first", "second"):
        run.at(1.0, lambda name=name: (order.append(name), run.resume(0), run.at(1.0, order.append, f"of {name}")))
    run.at(1.0, run.at, 1.0, run.resume, 0)
    run.at(1.0, run.at, 1.0, order.append, "last")
    run.run()
    assert order == ["first", "second", "goes on", "of first", "of second", "goes on", "last"]


def test_many_workers_are_a_few_events_and_little_memory() -> None:
    workers = 2000
    job = Job(
        ScheduledPull(), workers, Links([1.0] * workers, 5e-3), np.full(workers, 0.01), 32.0, steps=32, data="none"
    )
    tracemalloc.start()
    try:
        run = pulling.Pulling(job, lambda _: None)
        step, events = run.clock.step, 0

        def counted() -> None:
            nonlocal events
            events += 1
            step()

        run.clock.step = counted  # type: ignore[method-assign]
        record = run.run().record
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (record.steps == 32).all() and (record.pulls == 1).all() and record.messages.sum() > 10 * workers
    assert events < workers  # of SimPy; one for each message and step would be 47 per worker
    assert peak < 4500 * workers


# ---- images ----------------------------------------------------------------------------------------------------------


def test_every_worker_has_its_own_images_and_the_same_first_parameters() -> None:
    job = Job(ScheduledPull(), 4, Links([1.0] * 4, 0.0), np.ones(4), 1.0, steps=1, data="digits", lr=0.1)
    problem = Images(job)
    assert all(torch.equal(problem.values(0), problem.values(worker)) for worker in range(4))
    first = problem.values(0).clone()
    seen = [{int(row) for _ in range(22) for row in next(one._batches)} for one in problem._trainees]
    assert [len(rows) for rows in seen] == [22 * 16] * 4  # one pass with each image once
    assert len(set().union(*seen)) == 4 * 22 * 16
    problem.gradient([1])
    assert torch.equal(problem.values(1), first)  # a gradient alone changes nothing
    problem.step([1])
    assert not torch.equal(problem.values(1), first)
    assert torch.equal(problem.values(0), first)
    parameters = torch.cat([parameter.detach().reshape(-1) for parameter in problem._trainees[1].model.parameters()])
    assert torch.equal(parameters, problem.values(1))


def test_the_best_accuracy_is_that_of_the_best_parameters() -> None:
    job = Job(ScheduledPull(), 2, Links([1.0] * 2, 0.0), np.ones(2), 1.0, steps=1, data="digits", lr=0.1)
    problem = Images(job)
    for _ in range(60):
        problem.gradient([0, 1])
        problem.step([0, 1])
    good = problem.evaluate()["accuracy"]
    for worker in range(2):
        problem.values(worker).zero_()
    bad = problem.evaluate()["accuracy"]
    final = problem.final()
    assert good > 0.5 > bad
    assert (final["best_accuracy"], final["accuracy"]) == (pytest.approx(good), pytest.approx(bad))
    assert not problem.values(0).any()  # unchanged
