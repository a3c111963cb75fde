"""Processes of the launcher are killed, or stopped when they should act. Nothing of the job remains."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from launched import Launched
from pace import HANG_S, bound
from surviving import CONTINUE, Note

ENDS_WITHIN_S = 2.0  # after the last rank, although mpirun stays
# The child survives its parent, like a process of a data loader.
AVERAGES = """
import pathlib, subprocess, sys, torch
import sordino.torch as hvd
torch.set_num_threads(1)
hvd.init()
subprocess.Popen(["sleep", "300"])
hvd.allreduce(torch.ones(1000))
pathlib.Path(sys.argv[1], f"ready.{hvd.rank()}").touch()
while True:
    hvd.allreduce(torch.ones(1000))
"""
WAITS = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1], str(os.getpid())).touch(); time.sleep(1000)"


@pytest.mark.drill("the launcher killed")
@pytest.mark.parametrize("options", [[], CONTINUE], ids=["plain", "continue"])
@pytest.mark.parametrize("victim", ["front", "copy", "mpirun"])
def test_kill_9_of_the_launcher_leaves_nothing(
    starter: str, tmp_path: Path, note_time: Note, victim: str, options: list[str]
) -> None:
    if victim == "mpirun" and starter == "local":
        victim = "copy"  # no process is above it
    with Launched(tmp_path, ["-np", "2", *options, "--", "python", "-c", AVERAGES, str(tmp_path)]) as job:
        job.wait_for(lambda: all((tmp_path / f"ready.{rank}").exists() for rank in range(2)))
        by_mpirun = 1 + 2 * bool(options)  # itself, and a supervisor above each rank
        assert len(job.processes()) == 6 + by_mpirun * (starter == "mpi")  # front, copy; ranks, their children
        assert job.files, "the job has no files in shared memory, so this test could find none"
        pid = {"front": lambda: job.front.pid, "copy": job.copy, "mpirun": job.mpirun}[victim]()
        struck = time.monotonic()
        job.send(pid, signal.SIGKILL)
        assert job.ends() == (-9 if victim == "front" else 137)
        job.leaves_nothing()
        note_time("the launcher killed, until nothing is left", time.monotonic() - struck)


@pytest.mark.drill("supervisors left alone")
def test_supervisors_end_the_ranks_when_nobody_else_is_left(by_mpirun: None, tmp_path: Path) -> None:
    """As on another host, where only mpirun's daemon is above the supervisors."""
    with Launched(tmp_path, ["-np", "2", *CONTINUE, "--", "python", "-c", AVERAGES, str(tmp_path)]) as job:
        job.wait_for(lambda: all((tmp_path / f"ready.{rank}").exists() for rank in range(2)))
        above = [job.front.pid, job.copy(), job.mpirun()]
        for pid in above:
            job.send(pid, signal.SIGSTOP)  # so that none can act for the others
        for pid in above:
            job.send(pid, signal.SIGKILL)
        job.front.wait(HANG_S)
        job.leaves_no_process()


@pytest.mark.drill("mpirun that stays")
def test_mpirun_that_stays_is_ended(by_mpirun: None, tmp_path: Path, note_time: Note) -> None:
    ready = tmp_path / "ready"
    ready.mkdir()
    with Launched(tmp_path, ["-np", "2", *CONTINUE, "--", "python", "-c", WAITS, str(ready)]) as job:
        job.wait_for(lambda: len(list(ready.iterdir())) == 2)
        job.send(job.mpirun(), signal.SIGSTOP)
        for file in ready.iterdir():
            job.send(int(file.name), signal.SIGKILL)
        struck = time.monotonic()
        assert job.ends() == 137
        took = time.monotonic() - struck
        note_time("all ranks killed, mpirun stopped, until the job has ended", took)
        assert took < bound(0.25, ENDS_WITHIN_S), f"{took:.2f} s"
        job.leaves_nothing()


@pytest.mark.drill("a launcher that does not stop")
@pytest.mark.parametrize("options", [[], CONTINUE], ids=["plain", "continue"])
@pytest.mark.parametrize("killed", ["", "front"])
def test_mpirun_that_does_not_stop_is_killed(by_mpirun: None, tmp_path: Path, options: list[str], killed: str) -> None:
    """mpirun has the grace period of the user, which starts with the first signal."""
    ready = tmp_path / "ready"
    ready.mkdir()
    words = ["-np", "2", "--grace", "0.5", *options, "--", "python", "-c", WAITS, str(ready)]
    with Launched(tmp_path, words) as job:
        job.wait_for(lambda: len(list(ready.iterdir())) == 2)
        job.send(job.mpirun(), signal.SIGSTOP)
        job.send(job.front.pid, signal.SIGKILL if killed else signal.SIGTERM)
        assert job.ends() == (-signal.SIGKILL if killed else 128 + signal.SIGTERM)
        job.leaves_nothing()
