"""Decisions of the launcher on a clock of the test: restarts, ranks that end at once, patience."""

from __future__ import annotations

import functools
import os
import selectors
import signal
import socket
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sordino.awake import AwakeClock
from sordino.launcher import outcomes, processes, restarts
from sordino.launcher.discovery import Discovery, Host
from sordino.launcher.elastic import ElasticJob, Limits
from sordino.launcher.local import LocalJob
from sordino.launcher.outcomes import Deadlines, Outcomes
from sordino.launcher.processes import Ended, StopSignals
from sordino.launcher.ranks import Rank


def test_waits_between_starts_double_up_to_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now, waits = [0.0], []
    monkeypatch.setattr(restarts.time, "monotonic", lambda: now[0])

    def start(number: int, _: Any) -> Ended:
        now[0] += 3600 if number == 9 else 1  # one start has trained for an hour
        return Ended(3)

    stop: Any = SimpleNamespace(received=[], sleep=waits.append)
    assert restarts.repeat(start, 11, stop) == 3
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60, 0, 1]


def test_of_two_that_end_at_once_the_one_that_a_signal_has_ended_is_first() -> None:
    """The other rank died because of it."""

    def rank(number: int, code: int) -> Any:
        made: Any = object.__new__(Rank)
        made.number, made.process = number, SimpleNamespace(wait=lambda: code)
        return made

    for seen in ([rank(0, 1), rank(1, -9), rank(2, 0)], [rank(1, -9), rank(0, 1), rank(2, 0)]):
        job: Any = object.__new__(LocalJob)
        collected: list[int] = []
        job._events = SimpleNamespace(select=lambda _, seen=seen: [(SimpleNamespace(data=one), 0) for one in seen])
        job._collect = lambda one, collected=collected: collected.append(one.number)
        job._wait(0.0)
        assert collected == [1, 0, 2]


def test_patience_begins_anew_when_there_is_hope_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(outcomes, "AwakeClock", functools.partial(AwakeClock, clock=lambda: now[0]))
    job = Outcomes(3)

    def over_after(seconds: float) -> bool:
        """Return whether the job is over within `seconds`.

        Checks at the launcher's interval: a longer time between checks counts as time in which it was stopped.
        """
        end = now[0] + seconds
        while not job.over() and now[0] < end:
            now[0] += 0.02
        return job.over()

    job.note(1, 0, 12.0)
    job.hear(0, "waits")
    assert not over_after(0.9 * outcomes._PATIENCE_S)
    job.hear(0, "met")
    assert not over_after(100)
    job.hear(2, "waits")  # of the same cause
    assert not over_after(0.9 * outcomes._PATIENCE_S)
    assert over_after(0.2 * outcomes._PATIENCE_S)


def test_all_pending_output_of_a_rank_that_has_ended_is_passed_on() -> None:
    """Each read ends at the end of a line."""
    there, here = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    reading, writing = os.pipe()
    with there, selectors.DefaultSelector() as events, subprocess.Popen(["true"]) as process:
        rank = Rank(0, process, events, {here.detach(): writing})
        for line in (b"a\n", b"b\n"):
            there.send(line)
        process.wait()
        rank.finish()
    os.close(writing)
    with open(reading) as passed_on:
        assert passed_on.read() == "a\nb\n"


def not_permitted(*_: object) -> None:
    raise PermissionError


def test_children_of_another_user_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher ends without an error, and does not wait for them."""
    monkeypatch.setattr(os, "kill", not_permitted)
    monkeypatch.setattr(processes, "time", None)
    with processes.subreaper():
        child = subprocess.Popen(["sleep", "60"])
    assert child.poll() is None
    monkeypatch.undo()
    child.kill()
    child.wait()


def test_a_discovery_script_of_another_user_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "killpg", not_permitted)
    discovery = Discovery("sleep 60")
    discovery.look()
    script = discovery._running
    assert script is not None
    discovery.close()
    assert script.poll() is None
    script.kill()
    script.wait()


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> tuple[StopSignals, list[subprocess.Popen[bytes]]]:
    """Return stop signals and the list of started processes. SIGTERM comes before the launcher notes the first one."""
    stop, started = StopSignals(grace=5.0), list[subprocess.Popen[bytes]]()
    plain = subprocess.Popen

    def start(*words: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(plain(*words, **options))
        if len(started) == 1:
            signal.raise_signal(signal.SIGTERM)
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    return stop, started


def test_a_signal_while_ranks_are_started(
    interrupted: tuple[StopSignals, list[subprocess.Popen[bytes]]],
) -> None:
    stop, started = interrupted
    with tempfile.TemporaryDirectory() as folder, stop:
        job = LocalJob(3, ["sleep", "10"], dict(os.environ), Path(folder), False, Deadlines())
        assert job.run(stop).status == 128 + signal.SIGTERM
    assert [one.returncode for one in started] == [-signal.SIGTERM], "not SIGKILL, which comes later"


def test_a_signal_while_processes_of_an_elastic_job_are_started(
    interrupted: tuple[StopSignals, list[subprocess.Popen[bytes]]],
) -> None:
    """The agent gets the signal after its order."""
    stop, started = interrupted
    discovery: Any = SimpleNamespace(look=lambda: "", hosts=[Host("localhost", 3)], problem="", running=list)
    with stop:
        job = ElasticJob(["sleep", "10"], dict(os.environ), {}, discovery, Limits(3, 1, 3, 60.0), 5.0)
        assert job.run(stop).status == 128 + signal.SIGTERM
    assert [one.returncode for one in started] == [128 + signal.SIGTERM]


# Script that starts an orphan, and fails if the orphan still exists, as a zombie, 2 s later.
LEAVES_AN_ORPHAN = """
pid=$( (true & echo $!) )
for _ in $(seq 100); do [ -d /proc/$pid ] || exit 0; sleep 0.02; done
exit 3
"""


@pytest.mark.parametrize("launcher", ["local", "elastic", "mpirun"])
def test_orphans_are_reaped_while_the_job_runs(launcher: str) -> None:
    words, stop = ["sh", "-c", LEAVES_AN_ORPHAN], StopSignals()
    if launcher == "local":
        with tempfile.TemporaryDirectory() as folder:
            ended = LocalJob(1, words, dict(os.environ), Path(folder), False, Deadlines()).run(stop)
    elif launcher == "elastic":
        discovery: Any = SimpleNamespace(look=lambda: "", hosts=[Host("localhost", 1)], problem="", running=list)
        ended = ElasticJob(words, dict(os.environ), {}, discovery, Limits(1, 1, 1, 60.0), 5.0).run(stop)
    else:
        ended = processes.supervise(words, dict(os.environ), stop, over=lambda: False)
    assert ended.status == 0


def test_children_that_the_launcher_has_started_are_not_reaped() -> None:
    with subprocess.Popen(["false"]) as before, processes.subreaper() as reap, subprocess.Popen(["false"]) as child:
        for one, own in ((before, []), (child, [child.pid])):
            os.waitid(os.P_PID, one.pid, os.WEXITED | os.WNOWAIT)
            reap(own)
            assert one.wait() == 1
