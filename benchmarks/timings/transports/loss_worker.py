"""One rank of a job that averages over and over; rank 1 kills itself, and the others write when they were told.

Started by timings.transports.loss. Moments are by the clock of the whole machine.
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
_STEPS = 200  # before it; a rank that has just started has more to do than to notice


def main(folder: Path) -> int:
    """Averages until the loss; the status is 1 where none came."""
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
            time.sleep(0.5)  # the others are told as well, and by the kill, not by this rank's end
            return 0
    return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
