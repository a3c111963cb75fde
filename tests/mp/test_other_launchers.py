"""Ranks that another launcher than MPI's has started say so, rather than train alone beside each other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from checks.commands import SORDINO
from pace import HANG_S

SCRIPT = """
import sordino.torch as hvd
try:
    hvd.init()
    print(f"world {hvd.rank()} of {hvd.size()}", flush=True)
except hvd.SordinoError as error:
    print(f"refused: {error}", flush=True)
"""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def said(words: list[str], folder: Path, **more: str) -> list[str]:
    """What the ranks print, in some order."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [*words, str(script)], capture_output=True, text=True, timeout=HANG_S, env={**os.environ, **more}
    )
    assert done.returncode == 0, done.stderr
    return sorted(line for line in done.stdout.splitlines() if line.startswith(("world", "refused")))


def test_torchrun(tmp_path: Path) -> None:
    lines = said([*TORCHRUN, "2"], tmp_path)
    assert len(lines) == 2
    for rank, line in enumerate(lines):
        assert line.startswith(f"refused: WORLD_SIZE=2, RANK={rank}: torchrun has started 2 processes")
        assert "`sordino run -np 2 -- python script.py`" in line
    assert said([*TORCHRUN, "1"], tmp_path) == ["world 0 of 1"]


@pytest.mark.usefixtures("launcher")
def test_an_srun_that_mpi_does_not_know(tmp_path: Path) -> None:
    (line,) = said([sys.executable], tmp_path, SLURM_STEP_NUM_TASKS="4", SLURM_PROCID="1", SLURM_STEP_ID="0")
    assert line.startswith("refused: SLURM_STEP_NUM_TASKS says that a launcher started 4 processes, but MPI sees one")


@pytest.mark.usefixtures("launcher")
def test_mpi_comes_before_what_is_left_over(tmp_path: Path) -> None:
    one, two = ([*SORDINO, "run", "-np", ranks, "--", "python"] for ranks in "12")
    assert said(two, tmp_path, WORLD_SIZE="4", RANK="0") == ["world 0 of 2", "world 1 of 2"]
    assert said(one, tmp_path, WORLD_SIZE="1", RANK="0") == ["world 0 of 1"]
    (line,) = said(one, tmp_path, WORLD_SIZE="4", RANK="2")
    assert line.startswith("refused: WORLD_SIZE=4, RANK=2: a launcher of torch.distributed's kind")
