"""A job fails, and the launcher restarts it, up to the permitted number of times. A job that its user stops is not
restarted."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from launched import Launched
from pace import HANG_S

from sordino.launcher import restarts

# Runs argv[1], to fail, in the first argv[2] starts. Later starts end without an error.
FAILS = """
import os, pathlib, sys, time
start = int(os.environ["SORDINO_RESTART"])
rank = int(os.environ.get("SORDINO_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
pathlib.Path(sys.argv[3], f"start.{start}.{rank}").touch()
if rank == 1 and start < int(sys.argv[2]):
    exec(sys.argv[1])
if start < int(sys.argv[2]):
    time.sleep(100)
"""


def words(restarts: int, how: str, starts: int, folder: Path, *options: str) -> list[str]:
    program = ["python", "-c", FAILS, how, str(starts), str(folder)]
    return ["-np", "2", "--restarts", str(restarts), *options, "--", *program]


@pytest.mark.drill("restarted")
@pytest.mark.parametrize(
    ("how", "status"), [("os.kill(os.getpid(), 9)", 137), ("sys.exit(3)", 3), ("raise ValueError", 1)]
)
def test_a_failed_job_is_started_again(starter: str, tmp_path: Path, how: str, status: int) -> None:
    with Launched(tmp_path, words(3, how, 2, tmp_path)) as job:
        assert job.ends() == 0
        job.leaves_nothing()
        said = re.findall(r"sordino run: (the job .*)", job.output)
        assert len(said) == 2
        lived = [int(seconds) for seconds in re.findall(r"the job failed after (\d+) s ", job.output)]
        for number, text in enumerate(said, 1):
            assert re.match(rf"the job failed after \d+ s with status {status}\b", text)
            assert f"; restart {number} of 3" in text
            # It failed at once, if the machine is not too busy, so the wait before the next start grows each time.
            if max(lived) < restarts.AT_ONCE_S:
                assert text.endswith(f" in {number} s")
    assert sorted(path.name for path in tmp_path.glob("start.*")) == [
        f"start.{k}.{r}" for k in range(3) for r in (0, 1)
    ]


@pytest.mark.drill("restarts used up")
def test_the_restarts_are_used_up(starter: str, tmp_path: Path) -> None:
    with Launched(tmp_path, words(1, "sys.exit(3)", 5, tmp_path)) as job:
        assert job.ends() == 3
        job.leaves_nothing()
        assert "with status 3; restart 1 of 1" in job.output
        assert "with status 3; it has been restarted once, which is the limit" in job.output


@pytest.mark.drill("mpirun killed, restarted")
def test_a_killed_mpirun_is_one_more_failure(by_mpirun: None, tmp_path: Path) -> None:
    with Launched(tmp_path, words(1, "time.sleep(100)", 1, tmp_path)) as job:
        job.wait_for((tmp_path / "start.0.1").exists)
        job.send(job.mpirun(), signal.SIGKILL)
        assert job.ends() == 0
        job.leaves_nothing()
        assert "status 137, because mpirun was ended by signal 9 (SIGKILL); restart 1 of 1" in job.output


@pytest.mark.drill("stopped by its user")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("when", ["running", "waiting"])
def test_who_stops_the_command_wants_no_restart(
    starter: str, tmp_path: Path, note_time: Callable[[str, float], None], when: str, number: signal.Signals
) -> None:
    how, ready = ("time.sleep(100)", "start.0.1") if when == "running" else ("sys.exit(3)", "start.2.1")
    with Launched(tmp_path, words(9, how, 9, tmp_path)) as job:
        job.wait_for((tmp_path / ready).exists)
        if when == "waiting":  # 4 s, if starts do not take too long
            job.wait_for(lambda: "restart 3 of 9" in job.output)
        struck = time.monotonic()
        job.send(job.front.pid, number)
        assert job.ends() == 128 + number
        note_time(f"a signal to `sordino run` while {when}, until it has ended", time.monotonic() - struck)
        job.leaves_nothing()
        assert "restart 4" not in job.output and job.output.count("restart 1 of 9") == (when == "waiting")


# Rank 1 fails in the first start, before it has met the others. argv[1]: how the ranks meet.
FAILS_EARLY = """
import os, sys, time
import torch, torch.distributed as dist
import sordino.torch as hvd
rank, start = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
if start == "0" and rank == 1:
    time.sleep(1)  # the others come to the store meanwhile
    sys.exit(3)
for _ in range(2):
    if sys.argv[1] == "group":
        dist.init_process_group("sordino")
        ones = torch.ones(2)
        dist.all_reduce(ones)
        dist.destroy_process_group()
    else:
        hvd.init()
        ones = hvd.allreduce(torch.ones(2), op=hvd.Sum)
        hvd.shutdown()
    assert ones.tolist() == [3, 3]
sys.stdout.write(f"rank {rank} has met the others in start {start}\\n")
"""


@pytest.mark.drill("restarted by torchrun")
@pytest.mark.parametrize("how", ["group", "init"])
def test_torchrun_starts_all_again(tmp_path: Path, how: str) -> None:
    """Ranks have met at torchrun's store different numbers of times, and its entries remain."""
    script = tmp_path / "fails_early.py"
    script.write_text(FAILS_EARLY)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", "--max-restarts=1"]
    done = subprocess.run([*words, str(script), how], capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" has met the others in start 1\n") == 3, done.stdout
