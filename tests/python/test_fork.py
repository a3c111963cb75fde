"""A process forked after init (a DataLoader worker) is no rank: it may end without harm, and cannot communicate."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import os, torch, sordino.torch as hvd
hvd.init()
class Numbers(torch.utils.data.Dataset):
    def __len__(self): return 16
    def __getitem__(self, index): return torch.full((3,), float(index))
for batch in torch.utils.data.DataLoader(Numbers(), 4, num_workers=2):
    hvd.allreduce(batch)
child = os.fork()
if child == 0:
    try:
        hvd.allreduce(torch.ones(1))
    except ValueError as error:
        hvd.shutdown()
        os._exit(0 if "forked" in str(error) else 2)
    os._exit(1)
assert os.waitpid(child, 0)[1] == 0
assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [1, 1]
print("fine")
"""


def test_forked_children_neither_harm_nor_hang() -> None:
    without_launcher = {key: value for key, value in os.environ.items() if not key.startswith(("OMPI_", "PMIX_"))}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, env=without_launcher, check=False
    )
    assert done.returncode == 0 and done.stdout.strip() == "fine", done.stderr
