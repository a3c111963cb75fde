"""A rank that averages until it is ended: `launched_worker.py FOLDER` (test_launcher.py)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

import sordino.torch as hvd


def main() -> None:
    torch.set_num_threads(1)
    hvd.init()
    subprocess.Popen(["sleep", "300"])  # like a data loader: it survives its parent
    tensor = torch.ones(1000)
    hvd.allreduce_(tensor)
    Path(sys.argv[1], f"ready.{hvd.rank()}").touch()
    while True:
        hvd.allreduce_(tensor)


if __name__ == "__main__":
    main()
