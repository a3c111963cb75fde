"""Random training scripts give the same results under DistributedOptimizer as under DDP (training_programs.py)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import forked
import pytest
from checks.commands import SORDINO
from pace import HANG_S

PROGRAMS = Path(__file__).with_name("training_programs.py")


def run(folder: Path, ranks: int, *words: str, **environment: str) -> None:
    command = [*SORDINO, "run", "-np", str(ranks), "--", *forked.python(), str(PROGRAMS), str(folder), *words]
    job = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert job.returncode == 0, job.stdout + job.stderr[-4000:]
    assert ": 0 failed" in job.stdout


@pytest.mark.parametrize("first", [100, 0, 25, 50, 75, 125])
@pytest.mark.drill("random training scripts")
def test_scripts_train_as_under_ddp(tmp_path: Path, first: int) -> None:
    run(tmp_path, 2, "--first", str(first), "--count", "25")


@pytest.mark.drill("random training scripts of three ranks on two nodes")
def test_scripts_train_as_under_ddp_between_nodes(tmp_path: Path) -> None:
    run(tmp_path, 3, "--first", "300", "--count", "10", SORDINO_RANKS_PER_NODE="2")
