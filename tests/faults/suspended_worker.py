"""A rank that averages until the file `enough` is there: `suspended_worker.py FOLDER RANKS` (test_suspend_jobs.py).

FOLDER gets pid.R and steps.R of each rank R; steps.R grows by one byte per step.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

import sordino.torch as hvd

LATE_S = 0.05  # computing time of one rank in each step, while the others wait for it


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    hvd.init()
    rank = hvd.rank()
    (folder / f"pid.{rank}").write_text(str(os.getpid()))
    large = torch.full((1 << 16,), float(rank))
    steps, over = 0, False
    while not over:
        if rank == hvd.size() - 1:
            time.sleep(LATE_S)
        over = bool(hvd.allreduce(torch.tensor([float((folder / "enough").exists())]), op=hvd.Max, name="small"))
        under_way = hvd.allreduce_async(large, name="large")
        assert torch.equal(hvd.synchronize(under_way), torch.full((1 << 16,), (hvd.size() - 1) / 2))
        steps += 1
        with open(folder / f"steps.{rank}", "a") as file:
            file.write("+")
    assert hvd.size() == int(sys.argv[2]), "a rank was lost"
    print(f"rank {rank} ends well", flush=True)


if __name__ == "__main__":
    main()
