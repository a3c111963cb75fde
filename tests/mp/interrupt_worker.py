"""A rank of test_interrupts.py: rank 0 waits in one call after another for ranks that do not come, and gets a signal.

`interrupt_worker.py FOLDER CALL...`, where a call may be the name of an algorithm, which stands for a step with it. The
other ranks come after rank 0 was interrupted. Each rank writes its results to FOLDER/RANK.json.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import sordino.torch as hvd
from sordino.errors import SordinoError
from sordino.runtime.context import current

SMALL, LARGE = torch.ones(3), torch.ones(1 << 18)
CALLS = {
    "again": lambda: hvd.allreduce(SMALL, name="again"),
    "first": lambda: hvd.allreduce(SMALL, name="first"),
    "large": lambda: hvd.allreduce(LARGE, name="large"),
    "barrier": hvd.barrier,
    "allgather": lambda: hvd.allgather(SMALL, name="gather"),
    "synchronize": lambda: synchronize_twice(),
}


def synchronize_twice() -> None:
    """Wait for an operation. After an interrupt, its handle raises the error."""
    handle = hvd.allreduce_async(SMALL, name="later")
    try:
        hvd.synchronize(handle)
    except KeyboardInterrupt:
        outcome = outcome_of(lambda: hvd.synchronize(handle))
        assert "rank 0 was interrupted by a signal" in outcome, outcome
        raise


def training(algorithm: str) -> Callable[[], None]:
    """Take a first step on all ranks; return a function that takes another one."""
    model = torch.nn.Linear(2, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), algorithm=algorithm)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    step()
    return step


def send_when_waiting(number: signal.Signals, sent: list[float]) -> None:
    """Send this process a signal while it waits: 20 ms after an operation is in flight. Note the time in `sent`."""
    world = current().world

    def send() -> None:
        while not world.names_in_flight():
            time.sleep(0.002)
        time.sleep(0.02)
        sent.append(time.monotonic())
        os.kill(os.getpid(), number)

    threading.Thread(target=send).start()


def outcome_of(call: Any) -> str:
    try:
        call()
    except SordinoError as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def main() -> None:
    folder, calls = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    continues = os.environ.get("SORDINO_ON_PEER_LOST") == "continue"
    handled = []
    signal.signal(signal.SIGUSR1, lambda *_: handled.append(True))
    seen: dict[str, Any] = {}
    hvd.init()
    rank = hvd.rank()
    for name in calls:
        for _ in range(3):
            hvd.allreduce(SMALL, name="again")
        call = CALLS[name] if name in CALLS else training(name)
        done = folder / f"{name}.over"
        sent: list[float] = []
        if rank > 0:
            while not done.exists():
                time.sleep(0.005)
            outcome = outcome_of(call)
        else:
            send_when_waiting(signal.SIGINT, sent)
            try:
                call()
                first = "done"
            except KeyboardInterrupt:
                seen[f"{name} took"] = time.monotonic() - sent[0]
                first = "KeyboardInterrupt"
            done.touch()
            outcome = f"{first}, then {outcome_of(call)}"
        seen[name] = outcome
        if not continues:
            hvd.shutdown()
            hvd.init()
    # A handler that does not raise runs while the rank waits, and the wait continues.
    if rank == 0:
        send_when_waiting(signal.SIGUSR1, [])
    else:
        while not (folder / "handled").exists():
            time.sleep(0.005)
    if rank == 0:
        watcher = threading.Thread(target=lambda: touch_when(handled, folder / "handled"))
        watcher.start()
    seen["sum"] = hvd.allreduce(torch.tensor([rank + 1.0]), op=hvd.Sum, name="sum").item()
    seen["handled"] = len(handled)
    (folder / f"{rank}.json").write_text(json.dumps(seen))
    hvd.shutdown()


def touch_when(handled: list[bool], file: Path) -> None:
    while not handled:
        time.sleep(0.005)
    file.touch()


if __name__ == "__main__":
    main()
