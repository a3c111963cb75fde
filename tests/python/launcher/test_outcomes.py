"""The launcher's knowledge of its ranks, and its verdict: which rank failed first, and whether the job is over."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launched import eventually

from sordino._core import variables
from sordino.launcher import outcomes
from sordino.launcher.outcomes import Deadlines, Outcome, Outcomes, over_stderr


@pytest.mark.parametrize(
    ("codes", "of_mpirun", "status", "text"),
    [
        ({0: 0, 1: 0}, 0, 0, ""),
        ({0: 0}, 0, 0, "the end of rank 1 is unknown; the others finished"),
        ({0: 5}, 0, 5, "rank 0 ended with status 5; see its error above"),
        ({}, 0, 1, "no rank has reported its end; mpirun's status is 0"),
        ({}, 3, 3, "no rank has reported its end; mpirun's status is 3"),
        ({0: -64, 1: -1}, 0, 192, "rank 0 was ended by signal 64 (SIGRTMAX) and was the first to fail"),
    ],
)
def test_judgement(codes: dict[int, int], of_mpirun: int, status: int, text: str) -> None:
    job = Outcomes(2)
    for rank, code in codes.items():
        job.note(rank, code, float(rank))
    assert job.judge(of_mpirun) == (status, text)


@pytest.mark.parametrize(
    ("code", "joined", "status"),
    [
        pytest.param(0, True, 0, id="finishes"),
        pytest.param(1, False, 0, id="is refused"),  # the others have finished without it
        pytest.param(-9, False, 0, id="is killed before it joins"),
        pytest.param(3, True, 3, id="joins and fails"),
    ],
)
def test_a_rank_was_replaced(code: int, joined: bool, status: int) -> None:
    """Number 4 replaces rank 1, of three. Number 3 belongs to a process that the launcher has not started."""
    job = Outcomes(3)
    job.note(1, 7, 1.0)
    job.replace(1, 4)
    if joined:
        job.hear(4, "met")
    for rank, how in ((0, 0), (2, 0), (4, code)):
        assert not job.complete()
        job.note(rank, how, 2.0 + rank)
    found, text = job.judge(0)
    assert job.complete() and found == status, text
    assert status != 0 or text == "rank 1 ended with status 7 and was replaced by process 4; the others finished"


def test_a_rank_that_left_has_not_finished() -> None:
    job = Outcomes(2)
    job.hear(0, "departs")
    job.note(0, 0, 1.0)
    job.note(1, -9, 2.0)
    assert job.judge(0) == (137, "rank 1 was ended by signal 9 (SIGKILL)")
    job.note(1, 0, 2.0)
    job.hear(1, "departs")
    assert job.judge(0) == (1, "no rank has finished: all have left before the end")


@given(texts=st.lists(st.binary(max_size=50), min_size=3, max_size=3), cut=st.integers(1, 40))
def test_what_supervisors_say_is_taken_out_of_stderr(
    capfdbinary: pytest.CaptureFixture[bytes], texts: list[bytes], cut: int
) -> None:
    capfdbinary.readouterr()
    with over_stderr(2) as (job, where, descriptor):
        token = where.removeprefix("stderr:").encode()
        lines = [b"\x1e%s 0 -9 12.5\n" % token, b"\x1e%s 1 0 13.25\r\n" % token, b""]
        stream = b"".join(text + line for text, line in zip(texts, lines))
        for begin in range(0, len(stream), cut):
            os.write(descriptor, stream[begin : begin + cut])
    assert {rank: (found.code, found.at) for rank, found in job.known().items()} == {0: (-9, 12.5), 1: (0, 13.25)}
    sys.stderr.flush()
    assert capfdbinary.readouterr().err == b"".join(texts)


def test_outcomes_are_known_if_the_reader_of_stderr_has_gone(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with capfd.disabled(), over_stderr(1) as (job, where, descriptor):
        kept = os.dup(2)
        os.dup2(writing, 2)
        monkeypatch.setattr(sys, "stderr", open(2, "w", closefd=False))  # noqa: SIM115
        try:
            os.write(descriptor, b"text\n")
            assert eventually(lambda: unread(descriptor) == 0, 10)
            os.write(descriptor, b"\x1e%s 0 0 12.5\n" % where.removeprefix("stderr:").encode())
            assert eventually(job.complete, 10)
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            os.close(writing)


def test_known_outcomes_do_not_change_while_they_are_read() -> None:
    """Another thread notes the ends of ranks."""
    job = Outcomes(2)
    job.note(0, 0, 1.0)
    for _ in job.known().items():
        job.note(1, 0, 2.0)
    assert job.complete()


def unread(descriptor: int) -> int:
    """Return the bytes in a pipe."""
    return int.from_bytes(fcntl.ioctl(descriptor, termios.FIONREAD, b"\0" * 4), sys.byteorder)


def test_a_rank_whose_own_error_ends_it_is_the_first() -> None:
    told = Outcomes(4)
    told.hear(3, "fails")  # it has handled the error, and ends well
    told.note(3, 0, 0.5)
    told.hear(1, "fails")
    told.hear(2, "fails")
    for rank, code in ((0, 1), (2, 3), (1, -15)):
        told.note(rank, code, float(rank))
    assert told.judge(0) == (1, "rank 1 ended with status 1 and was the first to fail; see its error above")
    assert told.first_of([Outcome(0.0, 0, 7)]).status == 7


def test_the_order_of_errors_is_that_of_their_links(tmp_path: Path) -> None:
    """Errors are in the order of their links, not of the folder or the ranks."""
    told = Outcomes(3, tmp_path)
    for moment, rank in enumerate((2, 0, 1)):
        link = tmp_path / f"fails.{rank}"
        link.symlink_to(str(os.getpid()))
        os.utime(link, ns=(moment, moment), follow_symlinks=False)
    failed = [Outcome(float(rank), rank, 1) for rank in range(3)]
    assert told.first_of(failed).rank == 2


def over_after_a_while(job: Outcomes) -> bool:
    """Return whether the job is over after a while; ranks may just be about to report."""
    assert not job.over()
    for _ in range(10):  # short sleeps, as in the launcher: a longer one counts as time in which it was stopped
        time.sleep(outcomes._PATIENCE_S / 8)
        job.over()
    return job.over()


@pytest.mark.parametrize(("code", "status"), [(-9, 137), (3, 3), (0, 1)])
def test_who_waits_for_one_that_has_ended_waits_for_ever(code: int, status: int) -> None:
    job = Outcomes(3)
    job.hear(0, "waits")
    assert not over_after_a_while(job)
    job.note(1, code, 12.0)
    assert over_after_a_while(job)
    for rank, at in ((0, 13.0), (2, 11.0)):
        job.note(rank, -15, at)  # ended because the job ended
    found, text = job.judge(0)
    assert found == status
    assert text.startswith("rank 1 ")
    assert text.endswith("before all ranks had met, and the others cannot start without it")


def test_nobody_waits_for_those_that_have_met(tmp_path: Path) -> None:
    job, where = outcomes.in_folder(3, tmp_path / "outcomes")
    for name in ("waits.0", "waits.1", "waits.2", "met.1"):
        Path(where, name).symlink_to(str(os.getpid()))
    Path(where, "1").symlink_to("-9 12.5")
    assert not over_after_a_while(job)
    for name in ("met.0", "met.2"):
        Path(where, name).symlink_to(str(os.getpid()))
    assert not over_after_a_while(job)
    Path(where, "0").symlink_to("0 13.5")
    Path(where, "2").symlink_to("0 13.5")
    assert job.over()
    assert job.judge(0) == (0, "rank 1 was ended by signal 9 (SIGKILL); the others finished")


def test_a_script_that_needs_no_others_is_not_disturbed() -> None:
    job = Outcomes(2)
    job.note(1, -9, 12.0)
    assert not over_after_a_while(job)
    job.hear(0, "waits")  # for a moment, after MPI was started by other means
    assert not job.over()
    job.hear(0, "met")
    assert not over_after_a_while(job)


def test_the_start_has_a_deadline(capfd: pytest.CaptureFixture[str]) -> None:
    job = Outcomes(3, kept=False, deadlines=Deadlines(start=0.4, warning=0.2))
    assert not job.over()
    job.hear(2, "waits")
    assert not job.over()
    time.sleep(0.25)
    job.hear(0, "waits")  # this does not restart the deadline
    assert not job.over() and not job.over()
    said = "in init() ranks 0, 2 wait for rank 1, for "
    assert capfd.readouterr().err.count(f"sordino run: stalled: {said}") == 1
    time.sleep(0.25)
    assert job.over() and job.judge(0) == (1, f"{said}more than 0.4 s (SORDINO_TIMEOUT_S)")


def test_the_deadlines_are_those_of_operations() -> None:
    standard = {name: float(default) for name, _, default, _ in variables() if name.endswith("_S")}
    assert Deadlines() == Deadlines(standard["SORDINO_TIMEOUT_S"], standard["SORDINO_STALL_WARN_S"])


def test_those_that_have_met_have_no_deadline() -> None:
    job = Outcomes(2, kept=False, deadlines=Deadlines(start=0.1))
    for rank in (0, 1):
        job.hear(rank, "waits")
        assert not job.over()
    for rank in (0, 1):
        job.hear(rank, "met")
    time.sleep(0.2)
    assert not job.over()
    time.sleep(0.2)
    assert not job.over() and job.judge(7) == (7, "")


def test_who_was_left_out_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcomes, "_LEFT_OUT_S", 0.1)
    job = Outcomes(4)
    job.hear(1, "left")
    job.hear(3, "left")
    job.note(3, -9, 12.0)
    job.note(0, 0, 13.0)
    assert not over_after_a_while(job)  # rank 2 continues to train
    job.note(2, 0, 14.0)
    assert over_after_a_while(job)
    text = "rank 3 was ended by signal 9 (SIGKILL), rank 1 did not end, although the others had continued without it"
    assert job.judge(0) == (0, f"{text}; the others finished")


@pytest.mark.parametrize("finalizing", [True, False])
def test_who_stands_still_when_all_others_have_come_to_their_end_is_killed(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, finalizing: bool
) -> None:
    monkeypatch.setattr(outcomes, "_LOOK_S", -1.0)  # read the states of processes at each check
    with subprocess.Popen(["sleep", "100"]) as other, subprocess.Popen(["sleep", "100"]) as still:
        job = Outcomes(2, kept=False, deadlines=Deadlines(start=0.1))
        for rank, process in enumerate((other, still)):
            job.hear(rank, "met", process.pid)
        still.send_signal(signal.SIGSTOP)
        assert not over_after_a_while(job)
        if finalizing:
            job.hear(0, "exits", other.pid)
            job.hear(1, "exits", still.pid)
        else:
            other.kill()
            other.wait()
        still.send_signal(signal.SIGCONT)
        assert not over_after_a_while(job)
        still.send_signal(signal.SIGSTOP)
        assert eventually(lambda: job.over() or still.poll() is not None, 20)
        assert still.poll() == -signal.SIGKILL
        assert (other.poll() is None) == finalizing
        other.kill()
    text = "sordino run: rank 1 was stopped (SIGSTOP) when all others had ended; killed"
    assert capfd.readouterr().err.splitlines() == [text]
    assert not job.over() and job.judge(137) == (137, "")
