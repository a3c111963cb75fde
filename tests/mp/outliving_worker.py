"""A rank of a job in which one rank is killed and the others continue to train: `mpirun -np N python
outliving_worker.py FOLDER ALGORITHM VICTIM` (test_outliving.py).

FOLDER gets said.R (stderr of rank R), trained.R of each rank that has taken all its steps and has logged the lost rank,
and report.R of each rank that reaches the end.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import signal
import statistics
import sys
import time
from pathlib import Path

import torch

import sordino.torch as hvd
from sordino.algorithms import ADPSGD, ScheduledPull
from sordino.errors import PeerLost

ALGORITHMS = {
    "none": ScheduledPull(2, overlap="none"),
    "naive": ScheduledPull(2, overlap="naive"),
    "autonomous": ScheduledPull(2),
    "manager": ScheduledPull(2, schedule="manager"),
    "adpsgd": ADPSGD(2),
}
STEPS, STRIKE, LATER = 300, 60, 150
STUCK_S = 250


def main() -> None:
    folder, algorithm, victim = Path(sys.argv[1]), ALGORITHMS[sys.argv[2]], int(sys.argv[3])
    faulthandler.dump_traceback_later(STUCK_S, exit=True)
    torch.set_num_threads(1)
    hvd.init()
    said = folder / f"said.{hvd.rank()}"
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(torch.nn.Linear(64, 500), torch.nn.ReLU(), torch.nn.Linear(500, 10))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05), model.named_parameters(), algorithm=algorithm
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    longest, between = 0.0, {}
    losses: list[float] = []

    def all_have_trained() -> bool:
        return all((folder / f"trained.{rank}").exists() for rank in range(hvd.size()) if rank != victim)

    step = 0
    # A faster rank continues to train. So no rank ends before the lost rank is noticed, no rank remains alone, and no
    # final loss is high because of a peer that has just begun.
    while step < STEPS or not all_have_trained():
        begin = time.monotonic()
        x = torch.randn(16, 64)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), x[:, :10].argmax(1))
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        if step == STRIKE and hvd.rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == LATER:
            between = optimizer.statistics.as_dict()
        longest = max(longest, time.monotonic() - begin)
        step += 1
        if step >= STEPS and "continues without it" in said.read_text():
            (folder / f"trained.{hvd.rank()}").touch()
    after = optimizer.statistics.as_dict()
    taken = "averagings" if isinstance(algorithm, ADPSGD) else "pulls"
    try:
        hvd.allreduce(torch.ones(1), name="all")
        collective = "went well"
    except PeerLost as error:
        collective = str(error)
    report = {
        "longest_step": longest,
        "losses": [losses[0], statistics.mean(losses[-50:])],
        "finite": all(math.isfinite(p.detach().sum().item()) for p in model.parameters()),
        "taken_later": after[taken] - between[taken],
        "collective": collective,
    }
    hvd.shutdown()
    (folder / f"report.{os.environ.get('SORDINO_RANK') or os.environ['OMPI_COMM_WORLD_RANK']}").write_text(
        json.dumps(report)
    )


if __name__ == "__main__":
    main()
