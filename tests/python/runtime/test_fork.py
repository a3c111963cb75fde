"""A process forked after init (a DataLoader worker) is no rank: it can end without harm, and cannot communicate."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import forked

WORKERS = """
import os, torch, sordino.torch as hvd
hvd.init()
class Numbers(torch.utils.data.Dataset):
    def __len__(self): return 16
    def __getitem__(self, index): return torch.full((3,), float(index))
for batch in torch.utils.data.DataLoader(Numbers(), 4, num_workers=2):
    hvd.allreduce(batch)
started = hvd.allreduce_async(torch.ones(1), name="started")
child = os.fork()
if child == 0:
    refused = 0
    for call in (lambda: hvd.allreduce(torch.ones(1)), lambda: hvd.synchronize(started)):
        try:
            call()
        except ValueError as error:
            refused += "forked" in str(error)
    hvd.shutdown()
    os._exit(refused)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
assert hvd.synchronize(started).item() == 1
assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [1, 1]
print("fine")
"""
TIMELINE = """
import os, sys, torch, sordino.torch as hvd
hvd.init()
hvd.start_timeline(sys.argv[1])
hvd.allreduce(torch.ones(1), name="before")
child = os.fork()
if child == 0:
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
hvd.allreduce(torch.ones(1), name="after")
hvd.stop_timeline()
"""


def run(program: str, *words: str) -> str:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("OMPI_", "PMIX_"))}
    done = subprocess.run(
        [*forked.python(), "-c", program, *words], capture_output=True, text=True, timeout=120, env=clean, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_forked_children_neither_harm_nor_hang() -> None:
    assert run(WORKERS) == "fine"


def test_a_forked_child_writes_nothing_into_the_timeline(tmp_path: Path) -> None:
    run(TIMELINE, str(tmp_path / "timeline"))
    events = json.loads((tmp_path / "timeline").read_text())
    lanes = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert lanes == ["allreduce.before", "allreduce.after"]
