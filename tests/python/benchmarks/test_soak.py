"""The soak's parts: its job, its report, its plan and its verdict. A short run is in
tests/faults/test_restart_checkpoints.py."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pace import HANG_S

import soak
from drills.course import Line, course, lines_of, told
from drills.job import Job, Kill
from sordino.launcher import mpi

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"

# --- A job and its processes ------------------------------------------------------------------------------------------

PROGRAM = """
import os, subprocess, sys, tempfile, time
rank = os.environ.get("SORDINO_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
null = subprocess.DEVNULL  # mpirun waits for all that hold its pipes
child = subprocess.Popen(["sleep", "100"], stdin=null, stdout=null, stderr=null)
if sys.argv[1] == "litter":
    tempfile.mkstemp(prefix="litter")
open(os.path.join(sys.argv[2], "pid." + rank), "w").write(str(os.getpid()))
time.sleep(0.5 if sys.argv[1] == "litter" else 100)
child.kill()
"""


@pytest.mark.drill("ranks killed by the soak")
@pytest.mark.parametrize("options", [[], ["--on-peer-lost", "continue"]], ids=["restart", "continue"])
def test_the_ranks_of_a_job_are_found_and_killed(launcher: mpi.Launcher, tmp_path: Path, options: list[str]) -> None:
    if launcher.family != "openmpi":
        pytest.skip("written for Open MPI's launcher")
    words = ["-np", "2", *options, "--", "python", "-c", PROGRAM, "stay", str(tmp_path)]
    with Job(tmp_path / "job", words) as job:
        files = [tmp_path / "pid.0", tmp_path / "pid.1"]
        while not all(file.exists() and file.read_text() for file in files):
            assert job.wait(0) is None
        pids = [int(file.read_text()) for file in files]
        ranks = job.ranks()
        assert ranks == {0: (pids[0], 0), 1: (pids[1], 0)}  # neither supervisors nor children
        kill = job.kill(ranks, [0, 1])
        assert (kill.ranks, kill.alive, kill.start) == ((0, 1), 2, 0)
        while (status := job.wait(kill.time + HANG_S)) is None:
            raise job.stuck("it should have ended")
        assert status == 137
        assert job.left() == []


def test_what_a_job_leaves_is_told(launcher: mpi.Launcher, tmp_path: Path) -> None:
    with Job(tmp_path / "job", ["-np", "1", "--", "python", "-c", PROGRAM, "litter", str(tmp_path)]) as job:
        while job.wait(0) is None:
            pass
        [left] = job.left()
        assert Path(left).name.startswith("litter")


def test_processes_of_others_are_not_the_job_s(tmp_path: Path) -> None:
    """Another job has another mark, so its process is not killed even if its number is listed."""
    other = subprocess.Popen(["sleep", "100"], env={**os.environ, "SORDINO_SOAK_JOB": "another"})
    try:
        with Job(tmp_path / "job", ["-np", "0", "--", "true"]) as job:  # refused
            while job.wait(0) is None:
                pass
            job.kill({0: (other.pid, 0)}, [0])
            assert job.left() == []
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


# --- The report -------------------------------------------------------------------------------------------------------


def lines(*starts: tuple[int, int, int, float]) -> list[Line]:
    """Return the lines of four ranks, one step per second, from (start, first step, last step, time of the first)."""
    return [
        Line(step, 4, start, at + step - first) for start, first, last, at in starts for step in range(first, last + 1)
    ]


def test_a_kill_that_ends_the_job() -> None:
    found = told([Kill(110.5, (3,), 4, 0)], lines((0, 1, 12, 100.0), (1, 6, 20, 120.0)), 99.0)
    # Step 12 was in flight, so it does not show that the job continued.
    assert found == [
        {
            "at": 11.5, "ranks": [3], "alive": 4, "start": 0, "after_step": 11, "outlived": False,
            "seconds_to_go_on": 9.5, "steps_repeated": 7, "ranks_after": 4,
        }
    ]  # fmt: skip


def test_a_kill_that_the_others_outlive() -> None:
    [one] = told([Kill(110.5, (3,), 4, 0)], lines((0, 1, 30, 100.0)), 100.0)
    assert (one["outlived"], one["after_step"], one["steps_repeated"]) == (True, 11, 0)
    assert one["seconds_to_go_on"] == 1.5  # step 12 may have been in flight, step 13 was not


def test_kills_of_ranks_that_start() -> None:
    kills = [Kill(106.5, (0,), 4, 0), Kill(115.0, (1,), 4, 1), Kill(125.0, (1, 2), 4, 2)]
    found = told(kills, lines((0, 1, 7, 100.0), (3, 6, 9, 130.0)), 100.0)
    assert [one["after_step"] for one in found] == [7, None, None]
    assert [one["seconds_to_go_on"] for one in found] == [23.5, 15.0, 5.0]
    assert [one["steps_repeated"] for one in found] == [2, 2, 2]


def test_a_kill_after_the_last_step() -> None:
    [one] = told([Kill(150.0, (0,), 4, 0)], lines((0, 1, 7, 100.0)), 100.0)
    assert one["seconds_to_go_on"] is None and one["steps_repeated"] is None and not one["outlived"]


def test_the_course_has_both_ends_of_every_start() -> None:
    points = course(lines((0, 1, 3000, 0.0), (1, 2951, 5000, 4000.0)), 0.0)
    assert [0.0, 1] in points and [2999.0, 3000] in points and [4000.0, 2951] in points and points[-1][1] == 5000
    assert len(points) < 500


def test_a_log_goes_on_after_a_line_that_was_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("progress_of_the_example", EXAMPLES / "laboratory" / "progress.py")
    assert spec is not None and spec.loader is not None
    progress: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(progress)
    path = tmp_path / "steps.jsonl"
    assert lines_of(path) == ([], 0)
    progress.StepLog(str(path)).step(1, 2.5, 4)
    assert json.loads(path.read_text())["loss"] == 2.5
    path.write_text(path.read_text() + '{"step": 2, "lo')
    monkeypatch.setenv("SORDINO_RESTART", "3")
    log = progress.StepLog(str(path))
    log.step(2, 2.25, 3)
    log.step(3, 2.0, 3)
    found, torn = lines_of(path)
    assert [(line.step, line.ranks, line.start) for line in found] == [(1, 4, 0), (2, 3, 3), (3, 3, 3)] and torn == 1


# --- The plan, and the verdict ----------------------------------------------------------------------------------------


def plan(**others: Any) -> soak.Plan:
    fields: dict[str, Any] = {"example": EXAMPLES / "train.py", "ranks": 4, "mode": "restart", "minutes": 20.0}
    fields |= {"every": 30.0, "seed": 1, "algorithm": "allreduce", "data": "digits", "checkpoint_every": 50}
    return soak.Plan(**{**fields, **others})


def test_kills_come_on_average_at_the_interval() -> None:
    moments = plan(minutes=500.0).moments()
    assert 950 < len(moments) < 1050 and 200 < sum(count == 2 for _, count in moments) < 300
    gaps = [later - earlier for (earlier, _), (later, _) in pairwise(moments)]
    assert min(gaps) >= 15 and max(gaps) <= 45 and max(gaps) - min(gaps) > 25
    assert moments == plan(minutes=500.0).moments() != plan(minutes=500.0, seed=2).moments()
    assert all(at <= 60 * 0.35 for at, _ in plan(minutes=0.25, every=6.0).moments())


def test_steps_are_as_many_as_the_time_allows() -> None:
    trial = {"start_seconds": 10.0, "steps_per_second": 20.0}
    assert soak.steps_for(plan(), trial) == pytest.approx(24000 * (1 - (10 + 2 + 1.25) / 30), abs=1)
    assert soak.steps_for(plan(mode="continue"), trial) == pytest.approx(24000 * (1 - 13.25 / 120), abs=1)
    assert soak.steps_for(plan(every=5.0), trial) == 2400


CALM = {"test_accuracy": 0.9, "parameters_sha256": "a"}
STORMY = {"status": 0, "test_accuracy": 0.9, "parameters_sha256": "a", "steps_missing": 0, "left": []}
STORMY |= {"restarts_unexplained": 0}


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        ({}, []),
        ({"test_accuracy": 0.889}, ["points of accuracy from the undisturbed run"]),
        ({"status": 1}, ["exit status"]),
        ({"steps_missing": 1}, ["steps that were never taken"]),
        ({"restarts_unexplained": 2}, ["restarts that no kill explains"]),
        ({"left": ["x"]}, ["processes and files left behind"]),
        ({"parameters_sha256": "b"}, ["models with other bits than the undisturbed one"]),
    ],
)
def test_every_target_can_be_missed(change: dict[str, Any], missed: list[str]) -> None:
    targets = soak.judged(plan(), CALM, STORMY | change)
    assert [one["what"] for one in targets if one["met"] is False] == missed


@pytest.mark.parametrize(("option", "value"), [("--minutes", "0"), ("--every", "-1"), ("--steps", "0")])
def test_wrong_options_are_refused(capsys: pytest.CaptureFixture[str], option: str, value: str) -> None:
    with pytest.raises(SystemExit):
        soak.main([option, value])
    assert f"{option} {float(value):g}" in capsys.readouterr().err.replace(".0:", ":")
