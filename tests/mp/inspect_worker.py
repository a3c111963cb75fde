"""A rank that comes late to an operation, in several ways: `inspect_worker.py FOLDER STAGE...`. A stage ends when the
file FOLDER/STAGE exists."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path

import torch

import sordino.torch as hvd

folder = Path(sys.argv[1])


def late(stage: str) -> None:
    """Come late. In the stage "held" the rank holds the GIL until the pipe FOLDER/held is opened."""
    if stage == "held":
        ctypes.PyDLL(None).open(str(folder / stage).encode(), os.O_RDONLY)
        return
    while not (folder / stage).exists():
        time.sleep(0.05)


def main() -> None:
    hvd.init()
    rank, last = hvd.rank(), hvd.size() - 1
    (folder / f"pid.{rank}").write_text(str(os.getpid()))
    few = torch.ones(3)
    for stage in sys.argv[2:]:
        for _ in range(3):  # so that the next one is a repeat
            hvd.allreduce(few, name="repeated")
        hvd.barrier()
        is_late = rank == (0 if stage == "first" else last)
        if is_late:
            late(stage)
        (folder / f"{stage}.{rank}").touch()
        if stage == "message":
            if rank == 0:
                hvd.recv(few, last)
            elif is_late:
                hvd.send(few, 0)
        elif stage == "repeated":
            hvd.allreduce(few, name="repeated")
        else:
            hvd.allreduce(torch.ones(70_000), name=f"loss.{stage}")
    hvd.shutdown()


main()
