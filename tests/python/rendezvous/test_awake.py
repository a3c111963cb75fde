"""Deadlines in Python do not count time in which the process was stopped. A clock that jumps simulates a stop."""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from test_socket_rendezvous import Launcher

from sordino import sim
from sordino.awake import LONGEST_STEP_S, AwakeClock, Deadline
from sordino.errors import Timeout
from sordino.launcher.outcomes import Deadlines, Outcomes
from sordino.rendezvous import sockets, store
from sordino.rendezvous.store import StoreRendezvous
from sordino.runtime.context import Context, current
from sordino.runtime.exchange.actions import Message
from sordino.runtime.exchange.async_agent import Agent

HOUR = 3600.0


class Jumping:
    """A clock that a test moves, and that also moves by itself between two reads."""

    def __init__(self, step: float = 0.0) -> None:
        self.time, self.step = 1000.0, step

    def __call__(self) -> float:
        self.time += self.step
        return self.time


def test_steps_count_as_far_as_the_process_ran() -> None:
    clock = Jumping()
    awake = AwakeClock(clock=clock)
    passed = 0.0
    for step, counted in ((0.1, 0.1), (0.0, 0.0), (LONGEST_STEP_S, LONGEST_STEP_S), (HOUR, LONGEST_STEP_S), (0.2, 0.2)):
        clock.time += step
        passed += counted
        assert awake.now() == pytest.approx(passed)


def test_a_deadline_passes_by_steps_alone() -> None:
    clock = Jumping()
    deadline = Deadline(3, clock=clock)
    clock.time += HOUR
    assert not deadline.passed()
    for _ in range(int(3 / 0.4)):
        assert not deadline.passed() and deadline.left() > 0
        clock.time += 0.4
    assert deadline.passed() and deadline.left() == 0


def test_a_job_that_was_stopped_has_not_waited_for_its_start() -> None:
    """Rank 1 does not come; the launcher was stopped for a day in between, as was rank 1."""
    outcomes, clock = Outcomes(2, deadlines=Deadlines(start=20, warning=10)), Jumping()
    outcomes._clock = AwakeClock(clock=clock)
    outcomes.hear(0, "waits")
    for _ in range(3):
        assert not outcomes.over()
        clock.time += 24 * HOUR
    for _ in range(100):
        clock.time += 0.3
        if outcomes.over():
            break
    assert outcomes.over() and "waits for rank 1" in outcomes.judge(0)[1]


class Patient(Agent):
    """Agent that is overdue five seconds after it was made."""

    overdue = False

    def __init__(self, context: Context) -> None:
        super().__init__(context, [0], 0)
        self.due = self.now() + 5

    def _deadline(self) -> float:
        return self.due

    def _overdue(self, now: float) -> Iterable[Any]:
        self.overdue, self.due = True, math.inf
        return ()

    def _act(self, now: float, action: Any) -> None: ...

    def _heard(self, now: float, sender: int, message: Message) -> Iterable[Any]:
        return ()

    def _lost(self, now: float, place: int) -> Iterable[Any]:
        return ()

    def _done(self, now: float, place: int, number: int, failure: str) -> Iterable[Any]:
        return ()

    def _alarmed(self, now: float) -> Iterable[Any]:
        return ()

    def _is_over(self) -> bool:
        return False


def test_asynchronous_algorithms_have_the_clock_of_their_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def body() -> bool:
        agent = Patient(current())
        agent.start()
        for _ in range(3):
            agent.mailbox.nudge()  # makes it read the clock
            time.sleep(0.05)
        agent.close()
        return agent.overdue

    monkeypatch.setattr(time, "monotonic", Jumping(HOUR))
    assert sim.run(1, body) == [False]


class Store:
    """A store in which the other rank's value arrives late."""

    def __init__(self, late: int) -> None:
        self.values: dict[str, bytes] = {}
        self.late = late

    def set(self, name: str, value: bytes) -> None:
        self.values[name] = value

    def get(self, name: str) -> bytes:
        return self.values[name]

    def check(self, names: list[str]) -> bool:
        self.late -= len(names) > 1
        if self.late == 0:
            self.values[names[1]] = b"theirs"
        return all(name in self.values for name in names)


def test_ranks_that_were_stopped_meet_at_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "AwakeClock", functools.partial(AwakeClock, clock=Jumping(HOUR)))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    assert StoreRendezvous(Store(4), "p", 0, b"", 20, 20).gather("k", [0, 1], b"mine") == [b"mine", b"theirs"]
    with pytest.raises(Timeout, match="waits for rank 1 to call"):
        StoreRendezvous(Store(100), "p", 0, b"", 20, 30).gather("k", [0, 1], b"mine")


def test_ranks_that_were_stopped_meet_at_the_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sockets, "Deadline", functools.partial(Deadline, clock=Jumping(HOUR)))
    launcher = Launcher(tmp_path)
    launcher.start()
    try:
        late = threading.Timer(0.7, lambda: launcher.rank(1, 60).gather("k", [0, 1], b"theirs"))
        late.start()
        assert launcher.rank(0, 60).gather("k", [0, 1], b"mine") == [b"mine", b"theirs"]
        late.join()
        with pytest.raises(Timeout, match="to call init"):
            launcher.rank(0, 1).gather("again", [0, 1], b"mine")
    finally:
        launcher.end()
