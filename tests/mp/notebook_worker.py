"""A rank of test_notebook.py: it runs cells as a notebook does, some of them twice, one of them interrupted.

`notebook_worker.py FOLDER`. Each rank writes the outcomes of its cells into FOLDER/RANK.json.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

CELLS = {
    "start": """
import torch
import sordino.torch as hvd
from sordino.algorithms import Crossover

torch.set_num_threads(1)
hvd.init()
""",
    "model": """
class Lora(torch.nn.Module):
    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = torch.nn.Linear(base.in_features, rank, bias=False)
        self.up = torch.nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))

torch.manual_seed(0)
model = torch.nn.Sequential(*(Lora(torch.nn.Linear(8, 8)) for _ in range(4)))

def clip(parameter):
    parameter.grad.mul_((1.0 / (parameter.grad.norm() + 1e-6)).clamp(max=1.0))

for parameter in model.parameters():
    if parameter.requires_grad:
        parameter.register_post_accumulate_grad_hook(clip)
""",
    "wrap": """
sgd = torch.optim.SGD(model.parameters(), lr=0.01)
opt = hvd.DistributedOptimizer(sgd, model.named_parameters(), algorithm=Crossover(group_size=2))
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
""",
    "train": """
data = torch.Generator().manual_seed(hvd.rank())
for step in range(steps):
    opt.zero_grad()
    torch.nn.functional.mse_loss(model(torch.randn(4, 8, generator=data)), torch.ones(4, 8)).backward()
    opt.step()
    steps_taken += 1
""",
    "end": """
average = hvd.average_parameters(model)
total = sum(float(value.double().abs().sum()) for value in average.values())
totals = hvd.allgather_object(total)
""",
}


class Notebook:
    """Run cells in one namespace and note the outcome of each."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {"steps": 0, "steps_taken": 0}
        self.outcomes: list[str] = []

    def run(self, cell: str) -> None:
        try:
            exec(compile(CELLS.get(cell, cell), f"<cell {cell.split()[0]}>", "exec"), self.names)
            outcome = "done"
        except (Exception, KeyboardInterrupt) as error:
            outcome = f"{type(error).__name__}: {error}"
        self.outcomes.append(f"{cell}: {outcome}")


def main() -> None:
    folder = Path(sys.argv[1])
    book = Notebook()
    for cell in ("start", "model", "wrap", "wrap", "del opt", "wrap"):
        book.run(cell)
    book.names["steps"] = 5
    book.run("train")
    # Ctrl-C reaches all ranks, which are at different places of a step.
    book.names["steps"] = 10**9

    over = threading.Event()

    def interrupt() -> None:
        while book.names["steps_taken"] < 20 and not over.is_set():
            time.sleep(0.001)
        if not over.is_set():
            os.kill(os.getpid(), signal.SIGINT)

    sender = threading.Thread(target=interrupt)
    sender.start()
    book.run("train")
    try:
        over.set()
        sender.join()
    except KeyboardInterrupt:  # the interrupt of another rank may have ended the cell before
        sender.join()
    for cell in ("hvd.shutdown()", "hvd.init()", "wrap", "steps = 5", "train", "end"):
        book.run(cell)
    told = {"outcomes": book.outcomes, "totals": book.names.get("totals")}
    (folder / f"{os.environ['SORDINO_RANK']}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
