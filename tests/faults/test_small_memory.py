"""Shared memory that is too small for Open MPI: the job runs without it, and logs that."""

from __future__ import annotations

from pathlib import Path

import pytest
from launched import Launched, own_mounts

PROGRAM = """
import torch, sordino.torch as hvd
hvd.init()
mean = hvd.allreduce(torch.full((1 << 22,), float(hvd.rank())))
assert bool((mean == 1).all())
print("right", hvd.rank(), flush=True)
"""


@pytest.mark.drill("small shared memory")
@pytest.mark.parametrize("size", ["64k", "20m"])
def test_a_small_dev_shm(by_mpirun: None, tmp_path: Path, size: str) -> None:
    before = own_mounts('mount -t tmpfs -o size=$1 tmpfs /dev/shm; shift; exec "$@"', size)
    with Launched(tmp_path, ["-np", "3", "--", "python", "-c", PROGRAM], before) as job:
        assert job.ends() == 0, job.output
        job.leaves_nothing()
        assert sorted(line for line in job.output.splitlines() if line.startswith("right")) == [
            "right 0",
            "right 1",
            "right 2",
        ]
        assert job.output.count("sordino run: /dev/shm has ") == 1
        free = {"64k": "64", "20m": "20,480"}[size]
        assert f"/dev/shm has {free} KiB free, but 3 ranks of Open MPI need 52,224 KiB" in job.output
