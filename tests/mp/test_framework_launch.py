"""Frameworks find the ranks of any launcher after `sordino.integrations.launch.join()`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import forked
import pytest
from checks.commands import SORDINO
from pace import HANG_S

SCRIPT = """
import os, sys
import torch, torch.distributed as dist
import sordino.torch as hvd
from sordino.integrations import launch

if "gloo" in sys.argv:
    dist.init_process_group("gloo")
unknown = launch.is_unknown_to_frameworks()
launch.join()
launch.join()
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
told = " ".join(os.environ.get(name, "-") for name in names)
group = "no group"
if dist.is_initialized():
    tensor = torch.tensor([hvd.rank() + 1.0])
    dist.all_reduce(tensor)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store.set(f"here/{hvd.rank()}", b"")
    group = f"{dist.get_backend()} sum {tensor.item():g}"
    dist.barrier()
assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
os.write(1, f"told {told}: {group}, {'unknown' if unknown else 'known'}\\n".encode())
"""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
WAYS = {
    "sordino run": [*SORDINO, "run", "--launcher", "local", "-np", "2", "--"],
    "mpirun": [*SORDINO, "run", "--launcher", "mpi", "-np", "2", "--"],
    "torchrun": TORCHRUN,
    "torchrun and gloo": TORCHRUN,
    "alone": [],
}


QUICK = ("sordino run", "torchrun")


@pytest.mark.parametrize("way", [pytest.param(way, marks=[] if way in QUICK else pytest.mark.soak) for way in WAYS])
def test_ranks_are_found(way: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    words = ["gloo"] if "gloo" in way else []
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MASTER_")}
    command = [*WAYS[way], *forked.python(), str(script), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, env=environment)
    assert done.returncode == 0, done.stderr
    told = sorted(line for line in done.stdout.splitlines() if line.startswith("told"))
    if way == "alone":
        assert told == ["told - - - -: no group, known"]
    else:
        backend = "gloo" if words else "sordino"
        known = "known" if way.startswith("torchrun") else "unknown"
        assert told == [f"told {rank} 2 {rank} 2: {backend} sum 3, {known}" for rank in (0, 1)]
