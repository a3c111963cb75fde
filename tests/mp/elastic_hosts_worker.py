"""A rank of test_elastic_hosts.py. It trains until there is a file `over` in its folder, and leaves at SIGTERM."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

import sordino.torch as hvd


@hvd.elastic.run
def train(state: Any, folder: Path) -> None:
    if hvd.rank() == 0:
        print(f"trains on {hvd.size()}", flush=True)
    over = torch.zeros(1)
    while not over:
        time.sleep(0.01)
        over = hvd.allreduce(torch.tensor([float((folder / "over").exists())]), op=hvd.Max)
        state.commit()


def main() -> None:
    folder = Path(sys.argv[1])
    (folder / f"pid.{os.getpid()}").touch()
    torch.set_num_threads(1)
    hvd.init()
    state = hvd.elastic.ObjectState(step=0)
    signal.signal(signal.SIGTERM, lambda *_: state.leave())
    train(state, folder)


if __name__ == "__main__":
    main()
