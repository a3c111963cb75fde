"""Ranks that are slow are not lost: nobody is left out on a busy machine, and asynchronous gossip does not wait."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launched import Launched, eventually

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
    with Launched(folder, [*words, "--", "python", str(WORKER), str(folder), json.dumps(plan)]) as job:
        assert eventually(lambda: job.front.poll() is not None, 200), job.output
        assert job.front.returncode == 0, job.output
        return [json.loads((folder / f"report.{rank}").read_text()) for rank in range(ranks)]


@pytest.fixture(autouse=True)
def openmpi(launcher: mpi.Launcher) -> None:
    if launcher.family != "openmpi":
        pytest.skip("written for Open MPI's fault tolerance")


@pytest.mark.timeout(60 + 240 * RUNS)
def test_nobody_is_left_out_on_a_busy_machine(tmp_path: Path, busy_cores: None) -> None:
    """Eight ranks, which are four times as many as cores, with two busy loops beside them."""
    for run in range(RUNS):
        for report in reports_of(tmp_path / str(run), 8, {"steps": 60}, SORDINO_SILENCE_S="5"):
            assert report["ended"] == "well" and report["members"] == list(range(8)) and not report["resized"], report


@pytest.mark.parametrize("algorithm", ["scheduled-pull", "adpsgd"])
def test_asynchronous_gossip_does_not_wait_for_a_slow_rank(tmp_path: Path, algorithm: str) -> None:
    """One is ten times slower than the others: they take their steps as without it."""
    plan: dict[str, Any] = {"algorithm": algorithm, "steps": 60, "pause_s": 0.02}
    even = reports_of(tmp_path / "even", 3, plan)
    uneven = reports_of(tmp_path / "uneven", 3, plan | {"slow": {"2": 0.18}})
    for rank in (0, 1):
        usual, beside = (statistics.median(run[rank]["seconds"]) for run in (even, uneven))
        assert beside < 1.5 * usual, f"a step of rank {rank} took {beside / usual:.2f} times as long"
        assert uneven[rank]["finite"] and uneven[rank]["loss"] < uneven[rank]["first_loss"]
