"""The launcher's patience and verdicts, on a clock that the test moves."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from sordino.launcher import outcomes, restarts
from sordino.launcher.local import LocalJob
from sordino.launcher.outcomes import Deadlines, Outcomes
from sordino.launcher.processes import Ended, StopSignals


class Clock:
    """Clock in seconds that a test sets."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds


class Sleeps(StopSignals):
    """Stop signals that note the seconds of each sleep, and do not sleep."""

    def __init__(self) -> None:
        super().__init__()
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


def test_restarts_wait_longer_each_time_but_no_longer_than_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(restarts.time, "monotonic", clock.now)
    stop, lives = Sleeps(), [1.0] * 8 + [100.0] + [1.0] * 2

    def start(number: int, _: StopSignals) -> Ended:
        clock.seconds += lives[number]
        return Ended(1)

    assert restarts.repeat(start, len(lives) - 1, stop) == 1
    # After a start that ran for long, the next one is made at once.
    assert stop.slept == [1, 2, 4, 8, 16, 32, 60, 60, 0, 1]


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (1, "with status 1; "),
        (137, "with status 137, which is signal 9 (SIGKILL); "),
        (192, "with status 192, which is signal 64 (SIGRTMAX); "),
        (255, "with status 255; "),  # of an ssh that does not reach its host, and of an aborted mpirun
    ],
)
def test_a_status_is_a_signal_only_if_there_is_such_a_signal(
    status: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert restarts.repeat(lambda *_: Ended(status), 1, Sleeps()) == status
    assert capsys.readouterr().err.count(text) == 2


def test_patience_begins_anew_when_there_was_hope_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 stands still after the other rank has ended, continues, and stands still again much later."""
    states = {11: "S", 12: "T"}
    monkeypatch.setattr(outcomes, "state_and_parent", lambda pid: (states[pid], 1))
    monkeypatch.setattr(outcomes, "_LOOK_S", -1.0)
    killed: list[int] = []
    monkeypatch.setattr(outcomes.os, "kill", lambda pid, number: killed.append(pid))
    told, clock = Outcomes(2, deadlines=Deadlines(start=100)), Clock()
    told._clock = clock  # type: ignore[assignment]
    for rank, pid in ((0, 11), (1, 12)):
        told.hear(rank, "waits", pid)
        told.hear(rank, "met", pid)
    told.hear(0, "exits", 11)
    assert not told.over()
    clock.seconds, states[12] = 60, "R"
    assert not told.over()
    for clock.seconds in (150.0, 249.0):
        states[12] = "T"
        assert not told.over() and not killed
    clock.seconds = 251
    assert not told.over() and killed == [12]


@pytest.mark.parametrize("first", [0, 1])
def test_of_two_ranks_that_end_at_once_the_killed_one_is_named(tmp_path: Path, first: int) -> None:
    """The other rank has ended with an error because of that."""
    script = f'if [ "$SORDINO_RANK" = {first} ]; then exit 3; else kill -9 $$; fi'
    job = LocalJob(2, ["sh", "-c", script], os.environ, tmp_path, False, Deadlines())
    try:
        for number in (0, 1):
            assert job._start(number)
            os.waitid(os.P_PID, job._living[number].process.pid, os.WEXITED | os.WNOWAIT)
        while job._living:
            job._wait(1)
        status, why = job._judged()
    finally:
        job._close()
    assert status == 128 + signal.SIGKILL
    assert why == f"rank {1 - first} was ended by signal 9 (SIGKILL) and was the first to fail"
