"""Ranks are slow, busy or late. They are not lost before a deadline, and a slow rank does not slow down algorithms that
never wait for others."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pace import HANG_S, bound, stretched
from surviving import SILENCE_S, Job, check_survivors

from cluster import Cluster
from sordino._core import build_info
from sordino.algorithms import ScheduledPull

SLOWER_S = 0.18
RUNS = int(os.environ.get("SORDINO_TEST_RUNS", "1"))  # 50 for a long test


@pytest.mark.drill("busy elsewhere")
def test_ranks_that_are_busy_elsewhere_stay(starter: str, tmp_path: Path) -> None:
    """Ranks may be busy longer than the silence that would make them lost: without communicating, and with the GIL
    held."""
    silence_s = stretched(SILENCE_S)
    faults = [
        {"victim": victim, "step": 6 + 3 * victim, "when": "between", "what": what, "seconds": silence_s + 1}
        for victim, what in enumerate(("sleep", "hold"))
    ]
    with Job(tmp_path, 3, {"faults": faults}, SORDINO_SILENCE_S=str(silence_s)) as running:
        left = check_survivors(running.finish(), set(), equal=True)
        for report in left:
            assert not report["resized"] and sum(seconds > silence_s for seconds in report["seconds"]) >= 2, report


@pytest.fixture
def busy_cores() -> Iterator[None]:
    """Run two processes that use all the processor time that they get."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    yield
    for loop in loops:
        loop.kill()
        loop.wait()


@pytest.mark.drill("a busy machine")
@pytest.mark.timeout(60 + 3 * HANG_S * RUNS)
def test_nobody_is_left_out_on_a_busy_machine(starter: str, tmp_path: Path, busy_cores: None) -> None:
    """Eight ranks, four times the number of cores, together with two busy loops. Other load on the machine stretches
    the silence."""
    silence_s = str(stretched(5))
    for run in range(RUNS):
        folder = tmp_path / str(run)
        folder.mkdir()
        with Job(folder, 8, {"steps": 30}, SORDINO_SILENCE_S=silence_s) as job:
            for report in check_survivors(job.finish(within=2 * HANG_S), set(), equal=True):
                assert not report["resized"], report


@pytest.mark.drill("a slow rank")
@pytest.mark.parametrize("algorithm", ["scheduled-pull", "adpsgd"])
def test_asynchronous_gossip_does_not_wait_for_a_slow_rank(starter: str, tmp_path: Path, algorithm: str) -> None:
    """One rank becomes ten times slower than the others. They take their steps meanwhile as if it were not there."""
    plan = {"algorithm": algorithm, "steps": 30, "pause_s": 0.02, "slow": {"2": SLOWER_S}, "slow_from": 15}
    with Job(tmp_path, 3, plan, SORDINO_SILENCE_S="10") as job:
        reports = check_survivors(job.finish(within=2 * HANG_S), set(), equal=False)
    *others, slow = (statistics.median(report["seconds"][15:]) for report in reports)
    assert slow > SLOWER_S, "no rank was slow"
    for rank, other in enumerate(others):
        # A rank that waited for it would be as slow. Other load slows both down equally.
        assert slow - other > SLOWER_S / 2, f"a step of rank {rank} took {other:.3f} s, {slow:.3f} s there"
    slowest = max(seconds for report in reports for seconds in report["seconds"])
    for report in reports:  # the averaged copy was published in the peer's last step, and pulled in this window
        assert bool(report["ages"]) == (algorithm == "scheduled-pull")
        window = ScheduledPull().interval * max(report["seconds"])
        oldest = max(report["ages"], default=0)
        assert oldest < bound(0.02, window + slowest), f"{oldest:.2f} s old, a window is {window:.2f} s"


LATE = """
import os, sys, time, torch
import sordino.torch as hvd
if os.environ["RANK"] == "2":
    time.sleep(float(sys.argv[1]))
try:
    hvd.init()
except hvd.SordinoError as error:
    os.write(1, f"{type(error).__name__}: {error}\\n".encode())
    sys.exit(3)
total = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
os.write(1, f"{total:g} by {hvd.transport()}\\n".encode())
hvd.shutdown()
"""


@pytest.mark.drill("late on another host")
@pytest.mark.usefixtures("emulated_hosts")
@pytest.mark.parametrize("late_s", [2.0, 8.0])
def test_who_starts_late_is_waited_for_until_the_deadline(tmp_path: Path, late_s: float) -> None:
    if not build_info()["ucx"]:
        pytest.skip("this build has no UCX")
    script = tmp_path / "late.py"
    script.write_text(LATE)
    deadline = stretched(4.0) if late_s > 4 else HANG_S
    with Cluster(hosts=3, mbps=1000) as cluster:
        env = {"SORDINO_TIMEOUT_S": str(deadline)}
        done = cluster.processes(3, ["python", str(script), str(stretched(late_s))], env, HANG_S)
    lines = sorted(done.stdout.splitlines())
    if late_s < 4:
        assert lines == ["3 by ucx + shared memory"] * 3, done.stdout + done.stderr
    else:
        missed = [line for line in lines if line.startswith("Timeout: ")]
        assert len(missed) >= 2 and all("for rank 2 to call" in line for line in missed[:2]), done.stdout + done.stderr
