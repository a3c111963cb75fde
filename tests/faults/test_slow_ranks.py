"""Ranks that are slow are not lost: nobody is left out on a busy machine. A slow rank or a slow link does not slow down
those that wait for nobody, or seldom."""

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
from cluster import Cluster
from launched import Launched, eventually

from sordino.algorithms import ScheduledPull
from sordino.cli import mpi

WORKER = Path(__file__).with_name("surviving_worker.py")
RUNS = int(os.environ.get("SORDINO_TEST_RUNS", "1"))  # 50 where there is time


@pytest.fixture
def busy_cores() -> Iterator[None]:
    """Two processes that take all the time they get."""
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
        assert eventually(lambda: job.front.poll() is not None, 200), job.output
        assert job.front.returncode == 0, job.output
        job.leaves_nothing()
        return [json.loads((folder / f"report.{rank}").read_text()) for rank in range(ranks)]


@pytest.fixture(autouse=True)
def openmpi(launcher: mpi.Launcher) -> None:
    if launcher.family != "openmpi":
        pytest.skip("written for Open MPI's fault tolerance")


@pytest.mark.timeout(60 + 240 * RUNS)
@pytest.mark.drill("a busy machine")
def test_nobody_is_left_out_on_a_busy_machine(tmp_path: Path, busy_cores: None) -> None:
    """Eight ranks, which are four times as many as cores, with two busy loops beside them."""
    for run in range(RUNS):
        for report in reports_of(tmp_path / str(run), 8, {"steps": 30}, SORDINO_SILENCE_S="5"):
            assert report["ended"] == "well" and report["members"] == list(range(8)) and not report["resized"], report


@pytest.mark.drill("a slow rank")
@pytest.mark.parametrize("algorithm", ["scheduled-pull", "adpsgd"])
def test_asynchronous_gossip_does_not_wait_for_a_slow_rank(tmp_path: Path, algorithm: str) -> None:
    """One becomes ten times slower than the others: they take their steps as before."""
    plan: dict[str, Any] = {"algorithm": algorithm, "steps": 30, "pause_s": 0.02}
    reports = reports_of(tmp_path, 3, plan | {"slow": {"2": 0.18}, "slow_from": 15})
    for rank, report in enumerate(reports[:2]):
        usual, beside = (statistics.median(report["seconds"][part]) for part in (slice(5, 15), slice(15, 30)))
        assert beside < 1.5 * usual, f"a step of rank {rank} took {beside / usual:.2f} times as long"
        assert report["finite"] and report["loss"] < report["first_loss"]
    assert statistics.median(reports[2]["seconds"][15:]) > 0.18, "nobody was slow"
    slowest = max(seconds for report in reports for seconds in report["seconds"])
    for report in reports:  # what is averaged with was published in the peer's last step, and pulled in this window
        assert bool(report["ages"]) == (algorithm == "scheduled-pull")
        window = ScheduledPull().interval * max(report["seconds"])
        assert max(report["ages"], default=0) < window + slowest, f"{report['ages']} s old, a window is {window:.2f} s"


@pytest.mark.drill("a slow link")
def test_a_slow_link(emulated_hosts: None, tmp_path: Path) -> None:
    """All-reduce is as slow as the slowest link; what communicates less, or waits for nobody, is not."""
    means = {}
    with Cluster(hosts=3, mbps=[1000, 1000, 10]) as cluster:
        for algorithm in ("allreduce", "local-sgd", "scheduled-pull"):
            folder = tmp_path / algorithm
            folder.mkdir()
            steps = 5 if algorithm == "allreduce" else 18
            plan = json.dumps({"algorithm": algorithm, "width": 256, "pause_s": 0.02, "steps": steps})
            command = ["python", str(WORKER), str(folder), plan]
            done = cluster.run(3, command, env={"SORDINO_TIMEOUT_S": "60"}, timeout=120, options=["--with-ft", "ulfm"])
            assert done.returncode == 0, done.stdout + done.stderr
            reports = [json.loads((folder / f"report.{rank}").read_text()) for rank in range(3)]
            for report in reports:
                assert report["members"] == [0, 1, 2] and report["finite"] and not report["resized"], report
                assert report["loss"] < report["first_loss"], report
            means[algorithm] = max(statistics.mean(report["seconds"][1:]) for report in reports)
    for algorithm in ("local-sgd", "scheduled-pull"):
        assert means[algorithm] < means["allreduce"] / 3, means
