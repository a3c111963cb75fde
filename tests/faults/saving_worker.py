"""Save in shards until step LAST, continuing from the newest checkpoint: `saving_worker.py FOLDER LAST`.

Prints a line with the checkpoint that it found, and a line after each complete step (test_restart_checkpoints.py).
"""

from __future__ import annotations

import sys

import torch

import sordino.torch as hvd
from sordino import checkpoint


def main() -> None:
    torch.set_num_threads(1)
    hvd.init()
    folder, last = checkpoint.Folder(sys.argv[1]), int(sys.argv[2])
    newest = folder.newest() if hvd.rank() == 0 else None
    step: int = hvd.broadcast_object(newest.step if newest else 0, root_rank=0)
    if step:
        state = folder.load(step)
        assert state["number"] == step and bool((state["data"] == step).all()) and len(state["data"]) == 300_001
    if hvd.rank() == 0:
        print(f"found {step}", flush=True)
    while step < last:
        step += 1
        state = {"number": step, "data": torch.full((300_001,), float(step))}
        folder.save_shards(step, checkpoint.share(state, hvd.rank(), hvd.size()))
        if hvd.rank() == 0:
            print(f"complete {step}", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
