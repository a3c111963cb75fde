"""Ranks that are started by torchrun, by srun without an MPI, or by torch.distributed itself meet as well."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import forked
import pytest
from checks.commands import SORDINO
from pace import HANG_S

# One write per line. torchrun starts `python -u`, whose print() writes the line's end separately, which may mix lines
# of two ranks.
SCRIPT = """
import os
import sordino.torch as hvd
try:
    hvd.init()
    said = f"world {hvd.rank()} of {hvd.size()}"
except hvd.SordinoError as error:
    said = f"refused: {error}"
os.write(1, f"{said}\\n".encode())
"""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def said(words: list[str], folder: Path, **more: str) -> list[str]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [*words, str(script)], capture_output=True, text=True, timeout=HANG_S, env={**os.environ, **more}
    )
    assert done.returncode == 0, done.stderr
    return sorted(line for line in done.stdout.splitlines() if line.startswith(("world", "refused")))


def test_torchrun(tmp_path: Path) -> None:
    assert said([*TORCHRUN, "2"], tmp_path) == ["world 0 of 2", "world 1 of 2"]
    assert said([*TORCHRUN, "1", "--no-python", *forked.python()], tmp_path) == ["world 0 of 1"]


# Counts steps and saves each; in the first start rank 1 fails after the third.
ELASTIC = """
import os, sys, torch
import sordino.torch as hvd
from sordino import checkpoint
hvd.init()
folder, start = checkpoint.Folder(sys.argv[1]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
newest = folder.newest()
step, total = (newest.step, newest.state["total"]) if newest else (0, torch.zeros(1))
os.write(1, f"start {start} from {step}\\n".encode())
while step < 6:
    total = total + hvd.allreduce(torch.tensor([float(hvd.rank() + 1)]), op=hvd.Sum)
    step += 1
    if hvd.rank() == 0:
        folder.save(step, {"total": total})
    hvd.barrier()
    if start == 0 and step == 3 and hvd.rank() == 1:
        os._exit(3)
os.write(1, f"total {total.item():g}\\n".encode())
"""


def test_a_restart_of_torchrun_is_a_new_world_from_the_newest_checkpoint(tmp_path: Path) -> None:
    script = tmp_path / "elastic.py"
    script.write_text(ELASTIC)
    words = [
        *TORCHRUN,
        "2",
        "--max-restarts",
        "2",
        "--no-python",
        *forked.python(),
        str(script),
        str(tmp_path / "saved"),
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    said = sorted(line for line in done.stdout.splitlines() if line.startswith(("start", "total")))
    assert said == ["start 0 from 0"] * 2 + ["start 1 from 3"] * 2 + ["total 18"] * 2


def test_srun_without_an_mpi(tmp_path: Path, free_port: int) -> None:
    """Two processes as srun starts them, without the variables by which an MPI would know its ranks."""
    slurm = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "localhost"}
    slurm["MASTER_PORT"] = str(free_port)
    words = 'SLURM_PROCID=0 "$@" & SLURM_PROCID=1 "$@"; wait $!'
    assert said(["sh", "-c", words, "sh", sys.executable], tmp_path, **slurm) == ["world 0 of 2", "world 1 of 2"]


GROUP = """
import os, sys, torch.distributed as dist, sordino.torch as hvd
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
for turn in range(2):
    hvd.init()
    os.write(1, f"world {hvd.rank()} of {hvd.size()}\\n".encode())
    hvd.shutdown()
dist.destroy_process_group()
"""


def test_torch_distributed_that_is_initialised(tmp_path: Path) -> None:
    """Ranks meet at the store of torch.distributed, also a second time. No variable gives the ranks' numbers."""
    script = tmp_path / "group.py"
    script.write_text(GROUP)
    words = [sys.executable, str(script), str(tmp_path / "store")]
    ranks = [subprocess.Popen([*words, str(rank)], stdout=subprocess.PIPE, text=True) for rank in (0, 1)]
    lines = [rank.communicate(timeout=HANG_S)[0].splitlines() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert lines == [["world 0 of 2"] * 2, ["world 1 of 2"] * 2]


@pytest.mark.usefixtures("launcher")
def test_mpi_comes_before_what_is_left_over(tmp_path: Path) -> None:
    one, two = ([*SORDINO, "run", "--launcher", "mpi", "-np", ranks, "--", *forked.python()] for ranks in "12")
    assert said(two, tmp_path, WORLD_SIZE="4", RANK="0") == ["world 0 of 2", "world 1 of 2"]
    assert said(one, tmp_path, WORLD_SIZE="1", RANK="0") == ["world 0 of 1"]
    (line,) = said(one, tmp_path, WORLD_SIZE="4", RANK="2")
    assert line.startswith("refused: WORLD_SIZE=4, RANK=2: a launcher for torch.distributed")
