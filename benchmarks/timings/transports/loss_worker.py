"""One rank of a job that averages repeatedly. Rank 1 kills itself, and the other ranks write the time of their error.

Started by timings.transports.loss. Times are by the clock that all hosts share.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

import sordino.torch as hvd
from sordino.errors import PeerLost

_VICTIM = 1
_STEPS = 200  # steps before the kill, because a rank that has just started is slower to notice it


def main(folder: Path) -> int:
    """Average until a rank is lost; return 1 if none is."""
    hvd.init()
    rank, values = hvd.rank(), torch.ones(1 << 14)
    for step in range(100 * _STEPS):
        if rank == _VICTIM and step == _STEPS:
            (folder / "killed").write_text(json.dumps({"at": time.time(), "transport": hvd.transport()}))
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            hvd.allreduce_(values, name="values")
        except PeerLost as error:
            (folder / f"told.{rank}").write_text(json.dumps({"at": time.time(), "said": str(error)}))
            time.sleep(0.5)  # so that other ranks notice the kill, not the end of this rank
            return 0
    return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
