"""A rank that repeats operations until a fault strikes: `turn_worker.py FOLDER PLAN` (turns.py).

PLAN is JSON, see `Plan`. FOLDER gets fault.R when the fault strikes, and report.R at the end, of each rank R.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from checks.repeated import in_one_shot
from checks.repeats import Program

import sordino.torch as hvd

STUCK_S = 250
TURNS = 12  # of each kind
LATE_S = 0.06  # longer than a rank lets others wait in a turn


@dataclass
class Plan:
    """The operations, and the fault.

    Attributes:
        kinds: kinds of operations, one after the other.
        way: "blocking" or "asynchronous".
        rows: rows of a rank's input.
        arena: whether inputs lie in shared memory.
        victim: rank that the fault strikes.
        what: "kill", "stop", or "leave" (shutdown() with an operation under way, while the rank `stopped` is stopped).
        when: "entered" (the victim waits in the turn for another rank), "late" (the others wait for the victim) or
            "inside" (all have come; in the middle of a large operation).
        strikes: turns of each kind in which the fault strikes.
        stopped: see `what`.
    """

    kinds: list[str]
    way: str = "blocking"
    rows: int = 1
    arena: bool = False
    victim: int = 0
    what: str = "kill"
    when: str = "entered"
    strikes: tuple[int, ...] = (6,)
    stopped: int = -1


def write(path: Path, content: object) -> None:
    """Write the whole file or nothing: a reader must not see half of it."""
    draft = path.with_name(path.name + ".new")
    draft.write_text(json.dumps(content))
    draft.rename(path)


def names_in_shm() -> list[str]:
    """Return the files of /dev/shm that this process has open or mapped."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    names = {line.split(maxsplit=5)[5] for line in maps if "/dev/shm/" in line}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            names.add(os.readlink(entry))
    return sorted(name for name in names if name.startswith("/dev/shm/"))


class Worker:
    def __init__(self, folder: Path, plan: Plan) -> None:
        self.folder, self.plan = folder, plan
        self.rank, self.size = hvd.rank(), hvd.size()
        self.program = Program(SimpleNamespace(rank=self.rank, size=self.size))  # type: ignore[arg-type]
        self.done, self.wrong = 0, 0

    def strike(self) -> None:
        write(self.folder / f"fault.{self.rank}", {"at": time.time(), "pid": os.getpid(), "names": names_in_shm()})
        os.kill(os.getpid(), signal.SIGSTOP if self.plan.what == "stop" else signal.SIGKILL)

    def strike_soon(self) -> None:
        """Strike from another thread, when this one is in the operation."""

        def later() -> None:
            time.sleep(0.003)
            self.strike()

        threading.Thread(target=later).start()

    def input_of(self, tensor: torch.Tensor) -> torch.Tensor:
        return hvd.shared_empty(tensor.shape).copy_(tensor) if self.plan.arena else tensor.clone()

    def take_turn(self, kind: str, turn: int) -> None:
        plan = self.plan
        inputs = self.program.inputs(kind, plan.rows, turn)
        mine, expected = self.input_of(inputs[self.rank]), self.program.expected(kind, inputs)
        late = plan.victim if plan.when == "late" else (plan.victim + 1) % self.size if plan.when == "entered" else -1
        if turn in plan.strikes:
            if self.rank == plan.victim and plan.when != "late":
                self.strike_soon()
            elif self.rank == plan.victim:
                time.sleep(0.003)
                self.strike()
            elif self.rank == late:
                time.sleep(LATE_S)
        if plan.way == "asynchronous":
            result = self.program.start(kind, mine, kind)()
        else:
            result = self.program.call(kind, mine, kind)
        if expected is not None:
            self.wrong += not torch.equal(result, expected)
        self.done += 1

    def leave(self) -> dict[str, Any]:
        """Return how a pending operation ends on this rank when others shut down while one rank is stopped."""
        mine = torch.full((2,), float(self.rank + 1))
        for _ in range(TURNS):
            hvd.synchronize(hvd.allreduce_async(mine, op=hvd.Sum, name="x"))
        if self.rank == self.plan.stopped:
            self.strike_at_once("stop")
            handle = hvd.allreduce_async(mine, op=hvd.Sum, name="x")
            return {"value": float(hvd.synchronize(handle)[0])}
        while not (self.folder / "stopped").exists():
            time.sleep(0.001)
        result = mine.clone()
        hvd.allreduce_async_(result, op=hvd.Sum, name="x")
        began = time.monotonic()
        hvd.shutdown()
        return {"value": float(result[0]), "shutdown_s": time.monotonic() - began}

    def strike_at_once(self, what: str) -> None:
        self.plan.what = what
        self.strike()

    def run(self) -> dict[str, Any]:
        if self.plan.what == "leave":
            return self.leave()
        for kind in self.plan.kinds:
            for turn in range(TURNS):
                self.take_turn(kind, turn)
        return {}


def ending(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what the work returns, and how it ended."""
    try:
        return {"ended": "well", **work()}
    except hvd.HorovodInternalError as error:
        return {
            "ended": type(error).__name__,
            "text": str(error),
            "named": list(getattr(error, "ranks", getattr(error, "missing", []))),
        }


def main() -> None:
    folder, plan = Path(sys.argv[1]), Plan(**json.loads(sys.argv[2]))
    faulthandler.dump_traceback_later(STUCK_S, exit=True)
    torch.set_num_threads(1)
    hvd.init()
    worker = Worker(folder, plan)
    report = ending(worker.run)
    report |= {"at": time.time(), "done": worker.done, "wrong": worker.wrong, "names": names_in_shm()}
    if hvd.is_initialized():
        report["in_one_shot"] = in_one_shot()
    hvd.shutdown()
    write(folder / f"report.{worker.rank}", report)


if __name__ == "__main__":
    main()
