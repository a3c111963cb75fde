"""Make and drop operations, optimizers, process sets and worlds, and report the resources that the process then holds.

flat_worker.py OUT OPERATIONS OBJECTS    writes to OUT.RANK the resources after a fifth of each phase and at its end
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import sordino.torch as hvd
from sordino.algorithms import ADPSGD, AllReduce, CaPS, Crossover, Layered, LocalSGD, ScheduledPull

ALGORITHMS = (
    AllReduce(),
    Crossover(),
    LocalSGD(2),
    LocalSGD(2, group_size=2),
    LocalSGD(1, group_size=2, exchange="allreduce"),
    Layered(group_size=1),
    CaPS(),
    ScheduledPull(),
    ADPSGD(),
)


SLACK = {"resident": 12 << 20, "descriptors": 3, "shared mappings": 6}  # for a few operations in flight
ENDS_S = 20.0  # longest time that a service outlives its optimizer, on a busy machine


def held() -> dict[str, int]:
    """Return the resident bytes, the descriptors, and the mappings, including those of peers' memory."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "resident": pages * 4096,
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "shared mappings": sum(" rw-s " in line or "/dev/shm" in line or "memfd" in line for line in maps),
    }


def settled() -> dict[str, int]:
    """Return `held()` once it no longer falls: the service of pulls ends only after all peers know that it ends."""
    found = held()
    while True:
        time.sleep(0.5)
        before, found = found, held()
        if found["descriptors"] >= before["descriptors"]:
            return found


def back_to(first: dict[str, int]) -> dict[str, int]:
    """Return `held()` once it is at most `first` plus SLACK, or after ENDS_S. With a leak it never falls that low."""
    until = time.monotonic() + ENDS_S
    while True:
        found = held()
        if time.monotonic() > until or all(found[what] <= first[what] + slack for what, slack in SLACK.items()):
            return found
        time.sleep(0.2)


def operation(turn: int) -> None:
    small, large = torch.ones(5), torch.ones(3_000)
    if turn % 4 == 0:
        hvd.synchronize(hvd.allreduce_async(large, name=f"{turn % 97}"))
    elif turn % 50 == 1:
        hvd.allgather(small[: 1 + hvd.rank()])
        hvd.broadcast_object({"turn": turn}, 0)
    else:
        hvd.allreduce_(small, op=hvd.Sum)


def optimizer(turn: int) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 2))
    algorithm = ALGORITHMS[turn % len(ALGORITHMS)]
    opt = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters(), algorithm=algorithm
    )
    for _ in range(3):
        opt.zero_grad(set_to_none=False)
        model(torch.ones(4, 40)).sum().backward()
        opt.step()
    opt.flush()


def process_set(turn: int) -> None:
    one = hvd.add_process_set([turn % 2])
    if one.included():
        hvd.allreduce(torch.ones(3), process_set=one)
    hvd.remove_process_set(one)


def world(turn: int) -> None:
    hvd.shutdown()
    hvd.init()
    operation(4 * turn)
    process_set(turn)


def main(out: str, operations: int, objects: int) -> None:
    torch.set_num_threads(1)
    hvd.init()
    told = {}
    work: dict[str, tuple[Callable[[int], None], int]] = {
        "operations": (operation, operations),
        "optimizers": (optimizer, objects),
        "process sets": (process_set, objects),
        "worlds": (world, objects // 3),
    }
    for name, (do, times) in work.items():
        for turn in range(times):
            if turn == times // 5:
                hvd.barrier()
                first = settled()
            do(turn)
        hvd.barrier()
        told[name] = [first, back_to(first)]
    Path(f"{out}.{hvd.rank()}").write_text(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
