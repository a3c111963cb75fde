"""One rank of a job with helpers: `mpirun -np N python helper_worker.py FOLDER HELPERS WHAT VICTIM` (test_helpers.py).

HELPERS: "groups of K" workers with a communicator each, or "K servers". FOLDER gets ended.R (how rank R of the launcher
ended), and trained.R of each worker that waits for a helper's end.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
from pathlib import Path

import torch

import sordino.torch as hvd
from sordino.algorithms import Algorithm, CaPS, Layered

STUCK_S = 60
STEPS = 20


def algorithm_of(helpers: str) -> Algorithm:
    count = int("".join(filter(str.isdigit, helpers)))
    if helpers.startswith("groups"):
        return Layered(count, "rank")
    return CaPS(threshold=101, exchange="parameter-server", servers=count, dedicated_servers=True)


def train(algorithm: Algorithm, what: str, victim: bool) -> list[float]:
    """Take all steps, or those up to the victim's fault. Return the first two weights."""
    model = torch.nn.Linear(50, 1)
    torch.nn.init.zeros_(model.weight)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(), algorithm=algorithm
    )
    for turn in range(STEPS):
        optimizer.zero_grad()
        model(torch.full((4, 50), float(hvd.rank() + 1))).sum().backward()
        if victim and turn == STEPS // 2:
            if what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("boom of the victim")
        optimizer.step()
    if what == "leave":
        hvd.shutdown()
    values: list[float] = model.weight[0, :2].tolist()
    return values


def main() -> None:
    folder, algorithm = Path(sys.argv[1]), algorithm_of(sys.argv[2])
    what, place = sys.argv[3], os.environ.get("SORDINO_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
    faulthandler.dump_traceback_later(STUCK_S, exit=True)
    torch.set_num_threads(1)
    told: dict[str, object] = {"worker": False}
    if what == "kill helper" and place == sys.argv[4]:
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        signal.setitimer(signal.ITIMER_REAL, 4.0)
    try:
        hvd.init(algorithm=algorithm)
        told.update(worker=True, rank=hvd.rank(), size=hvd.size(), local_size=hvd.local_size())
        if what == "kill helper":
            while True:
                train(algorithm, "", False)
                (folder / f"trained.{place}").touch()
        told["weights"] = train(algorithm, what, place == sys.argv[4])
    except SystemExit as end:
        told["status"] = end.code
        raise
    except hvd.HorovodInternalError as error:
        told.update(kind=type(error).__name__, text=str(error))
        raise
    finally:
        (folder / f"ended.{place}").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
