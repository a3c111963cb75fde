"""All ranks raise the same error for an operation that is refused, also a rank that hears of another's end at the same
time."""

from __future__ import annotations

from pathlib import Path

import pytest
from launched import Launched

PROGRAM = """
import os, pathlib, signal, subprocess, sys, time, torch
import sordino.torch as hvd
place = pathlib.Path(sys.argv[1])
hvd.init()
if hvd.rank() == 1:
    handle = hvd.allreduce_async(torch.ones(3), name="loss")
    time.sleep(0.1)  # the coordinator has heard of it
    (place / "new").write_text(str(os.getpid()))
    os.rename(place / "new", place / "pid")
    os.kill(os.getpid(), signal.SIGSTOP)
    hvd.synchronize(handle)
while not (place / "pid").exists():
    time.sleep(0.01)
time.sleep(0.2)
wakes = f"while kill -0 {os.getpid()}; do sleep 0.01; done; kill -CONT " + (place / "pid").read_text()
subprocess.Popen(["sh", "-c", wakes], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
hvd.allreduce(torch.ones(3, dtype=torch.float64), name="loss")
"""


@pytest.mark.drill("asleep while another refuses and ends")
def test_a_rank_that_slept_raises_what_all_raise(tmp_path: Path) -> None:
    with Launched(tmp_path, ["-np", "2", "--", "python", "-c", PROGRAM, str(tmp_path)]) as job:
        assert job.ends() == 1, job.output
        differ = "allreduce 'allreduce.loss': rank 0 and rank 1 differ in dtype: float64 against float32"
        assert job.output.count(f"sordino.errors.OperationMismatch: {differ}") == 2, job.output
        assert "PeerLost" not in job.output
