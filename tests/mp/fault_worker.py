"""A rank of a job with a fault: `mpirun -np N python fault_worker.py FOLDER WHAT WHEN VICTIM` (test_faults.py).

FOLDER gets pid.R, mapped.R (files of /dev/shm in its memory), fault.R (of the victim, at the fault) and report.R (of
each rank that raises an error of Sordino).
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

import sordino.torch as hvd
from sordino.algorithms import Algorithm, CaPS, Crossover, Layered, LocalSGD, PushSum

STUCK_S = 200
BIG = 1 << 25  # elements, 128 MiB: an all-reduce takes 0.1 s or more
MODEL: list[torch.nn.Parameter] = []  # one parameter, filled with the rank's number
Strike = Callable[[bool], None]


def write(path: Path, content: dict[str, object]) -> None:
    """Write the whole file or nothing: a reader must not see half of it."""
    draft = path.with_name(path.name + ".new")
    draft.write_text(json.dumps(content))
    draft.rename(path)


def happen(what: str) -> None:
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "_exit":
        os._exit(0)
    elif what == "raise":
        raise ValueError("boom of the victim")
    else:
        sys.exit(int(what.removeprefix("exit ")))


def between(strike: Strike) -> None:
    for turn in range(100):
        hvd.allreduce(torch.ones(1000), name="between")
        if turn == 5:
            strike(False)


def big(strike: Strike) -> None:
    tensor = torch.ones(BIG)
    for turn in range(5):
        handle = hvd.allreduce_async_(tensor, name="big")
        if turn == 1:
            time.sleep(0.02)
            strike(not hvd.poll(handle))
        hvd.synchronize(handle)


def backward(strike: Strike) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(50, 50) for _ in range(4)))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for turn in range(100):
        optimizer.zero_grad()
        middle = model[:2](torch.ones(3, 50))
        if turn == 5:
            middle.register_hook(lambda grad: strike(True))
        model[2:](middle).sum().backward()
        optimizer.step()


def exchange(strike: Strike) -> None:
    gossip(strike, Crossover())


def push(strike: Strike) -> None:
    gossip(strike, PushSum(overlap=2))


def shards(strike: Strike) -> None:
    gossip(strike, LocalSGD(2, hvd.size()))


def layers(strike: Strike) -> None:
    gossip(strike, Layered(1))


def skip(strike: Strike) -> None:
    gossip(strike, CaPS(threshold=101))


def serve(strike: Strike) -> None:
    gossip(strike, CaPS(threshold=101, exchange="parameter-server"))


def gossip(strike: Strike, algorithm: Algorithm) -> None:
    MODEL.append(torch.nn.Parameter(torch.full((BIG // 4,), float(hvd.rank()))))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(MODEL, lr=0.0), algorithm=algorithm)
    inside = threading.Event()

    def strike_inside() -> None:
        inside.wait()
        strike(inside.is_set())

    striking = threading.Thread(target=strike_inside, daemon=True)
    for turn in range(100):
        if turn == 5:
            striking.start()
            inside.set()
        optimizer.step()
        inside.clear()


def messages(strike: Strike) -> None:
    """A ring of messages: the victim is struck between its send and its receive."""
    exchange_messages(strike, 1000)


def large_messages(strike: Strike) -> None:
    exchange_messages(strike, 1 << 22)


def exchange_messages(strike: Strike, count: int) -> None:
    after, before = (hvd.rank() + 1) % hvd.size(), (hvd.rank() - 1) % hvd.size()
    got = torch.zeros(count)
    for turn in range(100):
        handle = hvd.send_async(torch.full((count,), float(turn)), after)
        if turn == 5:
            strike(False)
        assert hvd.recv(got, before if turn % 2 else None) == before
        hvd.synchronize(handle)
        assert got[0].item() == got[-1].item() == turn


def for_ever(strike: Strike) -> None:
    tensor = torch.ones(BIG)
    hvd.allreduce_(tensor)
    strike(False)
    while True:
        hvd.allreduce_(tensor)


WHEN = {
    "between": between,
    "big": big,
    "backward": backward,
    "exchange": exchange,
    "push": push,
    "shards": shards,
    "layers": layers,
    "skip": skip,
    "serve": serve,
    "messages": messages,
    "large messages": large_messages,
    "for ever": for_ever,
}


def kind_raised(call: Callable[[], object]) -> str:
    try:
        call()
    except hvd.HorovodInternalError as error:
        return type(error).__name__
    return "nothing"


def main() -> None:
    folder, what, when, victim = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
    faulthandler.dump_traceback_later(STUCK_S, exit=True)
    torch.set_num_threads(1)
    write(folder / f"pid.{os.environ.get('SORDINO_RANK') or os.environ['OMPI_COMM_WORLD_RANK']}", {"pid": os.getpid()})
    hvd.init()
    rank = hvd.rank()
    maps = Path("/proc/self/maps").read_text().splitlines()
    mapped = {line.split("/dev/shm/")[1].split()[0] for line in maps if "/dev/shm/" in line}
    write(folder / f"mapped.{rank}", {"names": sorted(mapped)})

    def strike(under_way: bool) -> None:
        if rank == victim or what == "nothing":
            write(folder / f"fault.{rank}", {"at": time.time(), "under_way": under_way})
            if what != "nothing":
                happen(what)

    try:
        WHEN[when](strike)
    except hvd.HorovodInternalError as error:
        report = {
            "at": time.time(),
            "kind": type(error).__name__,
            "text": str(error),
            **{name: getattr(error, name) for name in ("ranks", "operation", "missing") if hasattr(error, name)},
        }
        if MODEL:
            low, high = MODEL[0].detach().aminmax()
            report["values"] = [low.item(), high.item()]
            report["other_values"] = int(((MODEL[0] != low) & (MODEL[0] != high)).sum())
        write(folder / f"report.{rank}", report)
        calls = (
            lambda: hvd.allreduce(torch.ones(3), name="later"),
            lambda: hvd.allgather(torch.ones(3)),
            lambda: hvd.broadcast(torch.ones(3), root_rank=rank),
        )
        report["later"] = [kind_raised(call) for call in calls]
        hvd.shutdown()
        report["initialized"] = hvd.is_initialized()
        report["shut_down_at"] = time.time()
        write(folder / f"report.{rank}", report)


if __name__ == "__main__":
    main()
