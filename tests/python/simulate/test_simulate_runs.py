"""The simulator's lock-step engine: whole runs, refused arguments, and many workers."""

from __future__ import annotations

import signal
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from algorithm_table import CONSERVING
from lockstep_cases import CHOICES, WORKERS, OnTorch, job_of, seconds_of, silent

from sordino.algorithms import (
    DPSGD,
    AdaptiveInterval,
    Algorithm,
    CaPS,
    Crossover,
    ElasticAveraging,
    Layered,
    LocalSGD,
    ThresholdScheduler,
    names,
    resolve,
)
from sordino.errors import UsageError
from sordino.simulate import lockstep
from sordino.simulate.job import Outcome
from sordino.simulate.links import Links
from sordino.simulate.quadratic import Quadratic
from sordino.simulate.training import train

# ---- whole runs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", ("none", "digits"))
@pytest.mark.parametrize("name", names())
def test_every_algorithm_runs(name: str, data: str) -> None:
    if name in ("scheduled-pull", "adpsgd"):
        return
    parts: list[float] = []
    options: dict[str, Any] = {"data": data, "links": Links([1.0] * 3, 0.001), "message_bytes": 1e5, "points": 2}
    out = lockstep.run(job_of(resolve(name), 3, steps=4, **options), parts.append)
    assert parts == sorted(parts) and parts[-1] == 1.0
    assert out.record.curve[0]["time"] == 0.0 and len(out.record.curve) == 3
    assert out.record.curve[-1]["time"] == out.seconds >= 0.0399
    assert out.final.keys() >= {"consensus_distance", "accuracy" if data == "digits" else "distance"}
    timed = lockstep.run(job_of(resolve(name), 3, seconds=0.1, **options), silent)
    slowest = out.record.computing.max() / 4
    assert 0.1 - slowest < timed.seconds and timed.record.steps[0] == timed.record.steps.min() > 1
    assert timed.record.curve[-1]["time"] == timed.seconds


def test_a_step_begins_only_if_its_computation_ends_in_time() -> None:
    for seconds, steps in ((0.055, 5), (0.049, 4), (0.005, 0)):
        out = lockstep.run(job_of(DPSGD(), seconds=seconds, compute=np.array([0.01, 0.01, 0.01, 0.005])), silent)
        assert out.record.steps.tolist() == [steps] * WORKERS and out.seconds == pytest.approx(steps * 0.01)
        assert out.record.curve[-1]["time"] == out.seconds


@pytest.mark.parametrize("choice", ("crossover", "caps", "push-sum-overlap"))
def test_one_worker_trains_alone(choice: str) -> None:
    for data in ("none", "digits"):
        out = lockstep.run(job_of(CHOICES[choice], 1, steps=3, data=data), silent)
        assert out.seconds == pytest.approx(0.03) and not out.record.messages.any()


def test_a_run_follows_from_its_seed() -> None:
    def found(**options: Any) -> dict[str, Any]:
        out = lockstep.run(job_of(Crossover(), links=Links([1.0] * 4, 0.0), **options), silent)
        return {**out.record.as_dict(True), **out.final}

    assert found() == found() != found(seed=1)
    assert found(data="digits") == found(data="digits") != found(data="digits", seed=1)


@pytest.mark.parametrize("wrong", ("a gradient", "an evaluation"))
def test_what_goes_wrong_in_a_rank_is_raised(wrong: str) -> None:
    job = job_of(LocalSGD(interval=50), steps=5)  # no exchange, in which the other ranks would notice the loss
    problem = Quadratic(job)
    trainees = [OnTorch(problem, worker) for worker in range(WORKERS)]
    seen = 0

    def fail() -> None:
        raise RuntimeError("this is it")

    def has_next(sent: np.ndarray | None) -> bool:
        nonlocal seen
        seen += 1
        if seen == 3:
            if wrong == "an evaluation":
                fail()
            trainees[2].backward = fail  # type: ignore[method-assign]
        return True

    with pytest.raises(RuntimeError, match="this is it"):
        train(job, trainees, has_next)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Make SIGINT raise: a shell lets background processes ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_ends_all_ranks(interruptible: None) -> None:
    job = job_of(DPSGD())
    problem = Quadratic(job)
    trainees = [OnTorch(problem, worker) for worker in range(WORKERS)]
    seen = 0

    def has_next(sent: np.ndarray | None) -> bool:
        nonlocal seen
        seen += 1
        if seen == 3:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return seen < 20_000

    with pytest.raises(KeyboardInterrupt):
        train(job, trainees, has_next)
    deadline = time.monotonic() + 100
    while any(thread.name.startswith("rank-") for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert seen < 20_000


@dataclass(frozen=True)
class Refused:
    algorithm: Algorithm
    text: str
    data: str = "digits"


@pytest.mark.parametrize(
    "case",
    [
        Refused(Layered(communicator="rank"), r"communicator='rank'"),
        Refused(CaPS(exchange="parameter-server", servers=1, dedicated_servers=True), "dedicated_servers"),
        Refused(CaPS(scheduler=ThresholdScheduler()), "scheduler="),
        Refused(CaPS(statistics_interval=5), "statistics_interval=5"),
        Refused(LocalSGD(adaptive=AdaptiveInterval(4)), "adaptive="),
        Refused(LocalSGD(start="decay"), "start='decay'"),
        Refused(LocalSGD(log_distance=3), "log_distance=3"),
        Refused(DPSGD(buffers="average"), "buffers='average'"),
        Refused(ElasticAveraging(buffers="average"), "buffers='average'"),
        Refused(CaPS(detector="random"), "detector='random'", "none"),
        Refused(CaPS(sample_ratio=0.5), "sample_ratio=0.5", "none"),
        Refused(CaPS(detector="history", survey_interval=3), "detector='history'", "none"),
        Refused(CaPS(memory=0.5), "memory=0.5", "none"),
        Refused(Layered(check_stale=True), "check_stale=True", "none"),
        Refused(Crossover(segments=("nothing*",)), r"'nothing\*' matches no parameter", "none"),
        Refused(Crossover(group_size=3), "does not divide 4", "none"),
    ],
    ids=lambda case: case.text,
)
def test_settings_without_effect_are_refused(case: Refused) -> None:
    with pytest.raises(UsageError, match=case.text):
        lockstep.run(job_of(case.algorithm, data=case.data), silent)


def test_other_refusals() -> None:
    with pytest.raises(UsageError, match=r"--kill 1@2\.5: .*DPSGD"):
        lockstep.run(job_of(DPSGD(), kills=((1, 2.5),)), silent)
    with pytest.raises(UsageError, match=r"servers=None.*20000000000 messages"):
        lockstep.run(job_of(CaPS(exchange="parameter-server"), 100_000), silent)


@pytest.mark.parametrize("choice", ("allreduce", *CONSERVING, "layered-groups"))
def test_many_workers(choice: str) -> None:
    workers = 20_000
    run: Callable[[], Outcome] = lambda: seconds_of(CHOICES[choice], [1.0] * workers, steps=2)  # noqa: E731
    tracemalloc.start()
    try:
        out = run()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1000 * workers
    assert out.record.bytes.mean() > 1e6 and out.final["distance"] < out.record.curve[0]["distance"]
