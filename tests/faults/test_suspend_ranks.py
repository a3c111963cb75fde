"""One rank is stopped (SIGSTOP), or does not come to an operation or to the start. After the silence or the deadline,
the others continue without it. It gets an error when it wakes up. Ranks without a quorum stop."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import forked
import pytest
from launched import Launched, eventually
from pace import HANG_S, bound, stretched
from surviving import CONTINUE, GOES_ON_WITHIN_S, PLAN_OF_HOSTS, Job, Note, check_survivors, hosts, tell_times

MEETING = str(Path(__file__).with_name("meeting_worker.py"))


@pytest.mark.drill("stopped")
@pytest.mark.parametrize("algorithm", ["allreduce", "crossover"])
def test_a_stopped_rank_is_left_out_and_learns_it(
    starter: str, tmp_path: Path, note_time: Note, algorithm: str
) -> None:
    faults = [{"victim": 1, "step": 8, "when": "between", "what": "stop"}]
    plan = {"algorithm": algorithm, "faults": faults, "wait_for": "woken"}
    with Job(tmp_path, 3, plan) as running:
        running.wait_for_files("resized.0", "resized.2")
        running.send(running.pid(1), signal.SIGCONT)
        running.wait_for_files("report.1")
        woken = running.read("report.1")
        assert woken["ended"] == "Evicted" and "continued without" in woken["text"], woken
        (tmp_path / "woken").touch()
        reports = running.finish(status=3)  # the status of the evicted rank
        reports[1] = None
        left = check_survivors(reports, {1}, equal=algorithm == "allreduce")
        silence_s = running.silence_s
        tell_times(running, left, {1}, note_time, f"SIGSTOP, {silence_s:g} s of silence", silence_s)


@pytest.mark.drill("stopped")
def test_a_stopped_rank_that_does_not_wake_up_does_not_hold_the_job(starter: str, tmp_path: Path) -> None:
    faults = [{"victim": 1, "step": 8, "when": "between", "what": "stop"}]
    with Job(tmp_path, 3, {"faults": faults}) as running:
        assert running.ends() == 0, running.output
        check_survivors([running.read("report.0"), None, running.read("report.2")], {1}, equal=True)
        assert "rank 1 did not end, although the others had continued without it; the others finished" in running.output
        running.leaves_nothing()


@pytest.mark.drill("stopped on another host")
def test_three_go_on_when_one_stands_still(way: str, tmp_path: Path, note_time: Note) -> None:
    """The rank's connections remain, and the kernel of its host still answers. Only its silence shows that it is
    stopped."""
    plan = {**PLAN_OF_HOSTS, "faults": [{"victim": 1, "step": 8, "when": "backward", "what": "stop"}]}
    with hosts(tmp_path, plan, way) as running:
        for resize in running.resizes(lost=1):
            after = resize["at"] - running.read("fault.1")["at"]
            note_time(f"SIGSTOP on another host, {running.silence_s:g} s of silence, by {way}", after)
            # Rank 0 gets signs of life from only two others, as in the test of two halves.
            assert after < bound(GOES_ON_WITHIN_S, 2 * running.silence_s)
        running.finish_without(1)


@pytest.mark.drill("no quorum")
def test_all_killed_but_one_that_stops(starter: str, tmp_path: Path) -> None:
    """One of two ranks is stopped for good. The other one cannot know that it is alone."""
    faults = [{"victim": 1, "step": 8, "when": "between", "what": "stop"}]
    with Job(tmp_path, 2, {"faults": faults}) as running:
        running.wait_for_files("report.0")
        alone = running.read("report.0")
        assert alone["ended"] == "NoQuorum" and "rank 1" in alone["text"], alone
        assert alone["finite"]
        assert eventually(lambda: not Path(f"/proc/{running.pid(0)}").exists(), HANG_S)
        os.kill(running.pid(1), signal.SIGKILL)
        reports = running.finish(status=3)
        assert reports[1] is None


@pytest.mark.drill("asleep")
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_does_not_come_is_left_out_after_the_deadline(
    starter: str, tmp_path: Path, note_time: Note, victim: int
) -> None:
    """Its process reports that it lives, but the rank does not come to the step. Rank 0 coordinates the operations."""
    others = [rank for rank in range(3) if rank != victim]
    faults = [{"victim": victim, "step": 8, "when": "between", "what": "wait", "for": "left out"}]
    deadline_s = stretched(3)
    variables = {"SORDINO_TIMEOUT_S": str(deadline_s), "SORDINO_STALL_WARN_S": str(deadline_s / 3)}
    with Job(tmp_path, 3, {"faults": faults, "wait_for": "woken"}, **variables) as running:
        running.wait_for_files(*(f"resized.{rank}" for rank in others))
        (tmp_path / "left out").touch()
        running.wait_for_files(f"report.{victim}")
        assert running.read(f"report.{victim}")["ended"] == "Evicted"
        (tmp_path / "woken").touch()
        reports = running.finish(status=3)
        reports[victim] = None
        left = check_survivors(reports, {victim}, equal=True)
        tell_times(running, left, {victim}, note_time, f"asleep, deadline of {deadline_s:g} s", deadline_s)
        assert "sordino: stalled: " in running.output and f"for rank {victim}" in running.output


@pytest.mark.drill("gone before all have met")
@pytest.mark.parametrize("options", [[], CONTINUE, ["--restarts", "1"]], ids=["raise", "continue", "restart"])
def test_a_rank_that_does_not_come_ends_this_start(starter: str, tmp_path: Path, options: list[str]) -> None:
    deadline_s = stretched(5)
    deadlines = [f"-xSORDINO_TIMEOUT_S={deadline_s}", f"-xSORDINO_STALL_WARN_S={deadline_s / 5}"]
    program = [*forked.python(), MEETING, "import time; time.sleep(300)"]
    with Launched(tmp_path, ["-np", "2", *deadlines, *options, "--", *program]) as job:
        again = "--restarts" in options
        assert job.ends() == (0 if again else 1), job.output
        job.leaves_nothing()
        waits = "sordino run: {}in init() rank 0 waits for rank 1, for {}"
        assert waits.format("stalled: ", "") in job.output
        assert job.output.count("met [0, 1]") == 2 * again
        assert f"{waits.format('', 'more than ')}{deadline_s:g} s (SORDINO_TIMEOUT_S)" in job.output
