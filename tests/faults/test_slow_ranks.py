"""Slow ranks are not lost: no rank is left out on a busy machine. A slow rank or link does not slow down ranks that
never wait for others, or seldom."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked
import pytest
from launched import Launched
from pace import HANG_S, bound, stretched

from cluster import Cluster
from sordino.algorithms import ScheduledPull

WORKER = Path(__file__).with_name("surviving_worker.py")
SLOWER_S = 0.18
SLOW_MBPS, WIDTH = 10, 256
RUNS = int(os.environ.get("SORDINO_TEST_RUNS", "1"))  # 50 where there is time


@pytest.fixture
def busy_cores() -> Iterator[None]:
    """Run two processes that use all the processor time that they get."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    yield
    for loop in loops:
        loop.kill()
        loop.wait()


def reports_of(folder: Path, ranks: int, plan: dict[str, Any], **variables: str) -> list[dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    words = ["--on-peer-lost", "continue", "-np", str(ranks)]
    for name, value in {"SORDINO_TIMEOUT_S": "60", **variables}.items():
        words += ["-x", f"{name}={value}"]
    with Launched(folder, [*words, "--", *forked.python(), str(WORKER), str(folder), json.dumps(plan)]) as job:
        assert job.ends(2 * HANG_S) == 0, job.output
        job.leaves_nothing()
        return [json.loads((folder / f"report.{rank}").read_text()) for rank in range(ranks)]


@pytest.mark.drill("a busy machine")
@pytest.mark.timeout(60 + 3 * HANG_S * RUNS)
def test_nobody_is_left_out_on_a_busy_machine(starter: str, tmp_path: Path, busy_cores: None) -> None:
    """Eight ranks, four times the number of cores, together with two busy loops. Other load on the machine stretches
    the silence."""
    silence_s = str(stretched(5))
    for run in range(RUNS):
        for report in reports_of(tmp_path / str(run), 8, {"steps": 30}, SORDINO_SILENCE_S=silence_s):
            assert report["ended"] == "well" and report["members"] == list(range(8)) and not report["resized"], report


@pytest.mark.drill("a slow rank")
@pytest.mark.parametrize("algorithm", ["scheduled-pull", "adpsgd"])
def test_asynchronous_gossip_does_not_wait_for_a_slow_rank(starter: str, tmp_path: Path, algorithm: str) -> None:
    """One rank becomes ten times slower than the others. They take their steps meanwhile as if it were not there."""
    plan: dict[str, Any] = {"algorithm": algorithm, "steps": 30, "pause_s": 0.02}
    reports = reports_of(tmp_path, 3, plan | {"slow": {"2": SLOWER_S}, "slow_from": 15})
    *others, slow = (statistics.median(report["seconds"][15:]) for report in reports)
    assert slow > SLOWER_S, "nobody was slow"
    for rank, report in enumerate(reports[:2]):
        # A rank that waited for it would be as slow. Other load slows both down equally.
        assert slow - others[rank] > SLOWER_S / 2, (
            f"a step of rank {rank} took {others[rank]:.3f} s, {slow:.3f} s there"
        )
        assert report["finite"] and report["loss"] < report["first_loss"]
    slowest = max(seconds for report in reports for seconds in report["seconds"])
    for report in reports:  # the averaged copy was published in the peer's last step, and pulled in this window
        assert bool(report["ages"]) == (algorithm == "scheduled-pull")
        window = ScheduledPull().interval * max(report["seconds"])
        oldest = max(report["ages"], default=0)
        assert oldest < bound(0.02, window + slowest), f"{oldest:.2f} s old, a window is {window:.2f} s"


@pytest.mark.drill("a slow link")
def test_a_slow_link(emulated_hosts: None, tmp_path: Path) -> None:
    """All-reduce is as slow as the slowest link. Algorithms that communicate less, or that do not wait, are faster."""
    medians = {}
    with Cluster(hosts=3, mbps=[1000, 1000, SLOW_MBPS]) as cluster:
        for algorithm in ("allreduce", "local-sgd", "scheduled-pull"):
            folder = tmp_path / algorithm
            folder.mkdir()
            steps = 5 if algorithm == "allreduce" else 18
            plan = json.dumps({"algorithm": algorithm, "width": WIDTH, "pause_s": 0.02, "steps": steps})
            command = [*forked.python(), str(WORKER), str(folder), plan]
            done = cluster.run(
                3,
                command,
                env={"SORDINO_TIMEOUT_S": "60", **forked.environment()},
                timeout=HANG_S,
                options=["--with-ft", "ulfm"],
            )
            assert done.returncode == 0, done.stdout + done.stderr
            reports = [json.loads((folder / f"report.{rank}").read_text()) for rank in range(3)]
            for report in reports:
                assert report["members"] == [0, 1, 2] and report["finite"] and not report["resized"], report
                assert report["loss"] < report["first_loss"], report
            medians[algorithm] = max(statistics.median(report["seconds"][1:]) for report in reports)
    transfer_s = 8 * 8 * WIDTH**2 / (SLOW_MBPS * 1e6)  # of the largest layer, in float64
    assert medians["allreduce"] > transfer_s
    for algorithm in ("local-sgd", "scheduled-pull"):
        assert medians[algorithm] < max(transfer_s, bound(0.02)), medians
