"""A rank that joins the job and prints all ranks: `meeting_worker.py CODE`. In the job's first start, rank 1 runs CODE
before that, for example `sys.exit(3)`."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    rank = os.environ.get("SORDINO_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
    if rank == "1" and os.environ["SORDINO_RESTART"] == "0":
        exec(sys.argv[1])
    import sordino.torch as hvd

    hvd.init()
    print("met", hvd.allgather_object(hvd.rank()))
