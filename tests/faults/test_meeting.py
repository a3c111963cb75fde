"""Ranks that end before all have started: the others must not wait forever, as they would in MPI."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from launched import Launched, eventually
from pace import stretched

from sordino._core import variables
from sordino.launcher import outcomes
from sordino.launcher.outcomes import Deadlines, Outcomes

CONTINUE = ["--on-peer-lost", "continue"]
# Rank 1 ends in the job's first start, in the way that argv[1] says.
PROGRAM = """
import os, sys
rank = os.environ.get("SORDINO_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
if rank == "1" and os.environ["SORDINO_RESTART"] == "0":
    exec(sys.argv[1])
import sordino.torch as hvd
hvd.init()
print("met", hvd.allgather_object(hvd.rank()))
"""
LOST = "sordino.errors.PeerLost: rank 1 ended before all ranks had met"
KILLED = "rank 1 was ended by signal 9 (SIGKILL) before all ranks had met"


def words(how: str, *options: str) -> list[str]:
    return ["-np", "2", *CONTINUE, *options, "--", "python", "-c", PROGRAM, how]


@pytest.mark.drill("killed before all have met")
def test_a_rank_killed_before_it_meets_the_others_ends_this_start(starter_anywhere: str, tmp_path: Path) -> None:
    with Launched(tmp_path, words("os.kill(os.getpid(), 9)", "--restarts", "1")) as job:
        assert job.ends() == 0, job.output
        job.leaves_nothing()
        # The meeting place tells ranks that `sordino run` started itself. Ranks that wait in MPI do not hear of it.
        said = LOST if starter_anywhere == "local" else f"{KILLED}, and the others cannot start without it"
        assert said in job.output
        assert "with status 137, which is signal 9 (SIGKILL); restart 1 of 1" in job.output
        assert job.output.count("met [0, 1]") == 2
        assert "\x1e" not in job.output


@pytest.mark.drill("gone before all have met")
@pytest.mark.parametrize(("how", "status"), [("sys.exit(0)", 1), ("sys.exit(3)", 3), ("raise ValueError", 1)])
def test_a_rank_that_leaves_before_it_meets_the_others_fails_the_job(
    starter: str, tmp_path: Path, how: str, status: int
) -> None:
    with Launched(tmp_path, words(how)) as job:
        assert job.ends() == status, job.output
        job.leaves_nothing()
        # If the status is not 0, mpirun itself ends the other ranks.
        assert ("before all ranks had met, and" in job.output) == (starter == "mpi" and how == "sys.exit(0)")
        assert (LOST in job.output) == (starter == "local")


@pytest.mark.drill("gone before all have met")
@pytest.mark.parametrize("options", [[], CONTINUE, ["--restarts", "1"]], ids=["raise", "continue", "restart"])
def test_a_rank_that_does_not_come_ends_this_start(starter: str, tmp_path: Path, options: list[str]) -> None:
    deadline_s = stretched(5)
    deadlines = [f"-xSORDINO_TIMEOUT_S={deadline_s}", f"-xSORDINO_STALL_WARN_S={deadline_s / 5}"]
    program = ["python", "-c", PROGRAM, "import time; time.sleep(300)"]
    with Launched(tmp_path, ["-np", "2", *deadlines, *options, "--", *program]) as job:
        again = "--restarts" in options
        assert job.ends() == (0 if again else 1), job.output
        job.leaves_nothing()
        waits = "sordino run: {}in init() rank 0 waits for rank 1, for {}"
        assert waits.format("stalled: ", "") in job.output
        assert job.output.count("met [0, 1]") == 2 * again
        assert f"{waits.format('', 'more than ')}{deadline_s:g} s (SORDINO_TIMEOUT_S)" in job.output


# --- The launcher's knowledge of the ranks ----------------------------------------------------------------------------


def over_after_a_while(job: Outcomes) -> bool:
    """Return whether the job is over after a while; ranks may just be about to report."""
    assert not job.over()
    for _ in range(10):  # as the launcher does, for a longer sleep is time in which it was stopped
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
        job.note(rank, -15, at)  # ended with the job, which it did not cause
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
    monkeypatch.setattr(outcomes, "_LOOK_S", -1.0)  # the states are older than this test's patience
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
