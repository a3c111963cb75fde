"""One rank of the part one_sided of scheduled_pull.py: rank 0 gets bytes from rank 1 while rank 1 computes.

Started by timings.scheduled_pull.one_sided; rank 0 prints its results as a line of JSON. A turn begins with an MPI
barrier. For --turn-ms rank 1 computes and rank 0 gets bytes repeatedly. Then rank 1 enters an MPI barrier. This also
completes a Get that waits for an MPI call of rank 1. Sordino is initialized only for its own pulls, and to test the
effect of its threads on MPI_Get.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch

import sordino.torch as hvd
from claims.scheduled_pull.snapshots import Computation, Snapshots
from sordino.report import Results

ALONE = ("nobody", "get", "get_calls", "get_allocated")  # without Sordino
BESIDE = ("snapshot", "get_beside")  # with Sordino initialized
_HEAD_START = 0.02  # seconds that rank 1 computes before the first get
_PAUSE = 2e-3  # seconds between two gets
_LATE = 0.9  # share of rank 1's time; a first get that lasts longer is late
_TORN_DOWN = 120.0  # seconds after the expected end at which the process is ended


class Turns:
    """Turns of both ranks.

    Args:
        mpi: mpi4py.MPI.
        seconds: time that rank 1 computes in a turn.
    """

    def __init__(self, mpi: Any, seconds: float) -> None:
        self._mpi, self._seconds = mpi, seconds
        self.communicator = mpi.COMM_WORLD.Dup()
        self.rank = self.communicator.rank
        self._computation = Computation()

    def take(self, get: Callable[[], object] | None, calls: bool) -> Results:
        """Take one turn; return the seconds of each get, whether the first was late, and rank 1's pieces per second."""
        self.meet()
        begin = time.perf_counter()
        until = begin + self._seconds
        times: list[float] = []
        pieces = 0
        if self.rank == 1:
            while time.perf_counter() < until:
                self._computation.piece()
                pieces += 1
                if calls:
                    self.communicator.Iprobe()
        else:
            time.sleep(_HEAD_START)
            while get is not None and time.perf_counter() < until - 2 * _PAUSE:
                started = time.perf_counter()
                get()
                times.append(time.perf_counter() - started)
                time.sleep(_PAUSE)
        self.meet()
        late = bool(times) and times[0] > _LATE * (self._seconds - _HEAD_START)
        return {"seconds": times, "late": late, "pieces": self.communicator.allreduce(pieces) / self._seconds}

    def meet(self) -> None:
        """Wait in a barrier that sleeps instead of spinning."""
        request = self.communicator.Ibarrier()
        while not request.Test():
            time.sleep(2e-4)


class Window:
    """Memory of rank 1 that rank 0 gets under a passive-target lock."""

    def __init__(self, turns: Turns, mpi: Any, count: int, allocated: bool) -> None:
        self._mpi, self._memory = mpi, np.full(count, turns.rank + 1, dtype=np.uint8)
        if allocated:
            self._window = mpi.Win.Allocate(count, 1, comm=turns.communicator)
            np.frombuffer(self._window.tomemory(), dtype=np.uint8)[:] = self._memory
        else:
            self._window = mpi.Win.Create(self._memory, 1, comm=turns.communicator)
        self.received = np.zeros(count, dtype=np.uint8)

    def get(self) -> None:
        """Get all bytes; return when they have arrived."""
        self._window.Lock(1, self._mpi.LOCK_SHARED)
        self._window.Get(self.received, 1)
        self._window.Unlock(1)

    def close(self) -> bool:
        """Free the window; return whether the bytes are right."""
        self._window.Free()
        return bool((self.received == 2).all())


def measure(mpi: Any, chosen: argparse.Namespace) -> Results:
    """Time every size and every way in turn. Collective."""
    turns = Turns(mpi, chosen.turn_ms / 1e3)
    sizes, missing = [], {}
    for size in chosen.sizes:
        windows: dict[str, Window] = {}
        for name, allocated in (("get", False), ("get_allocated", True)):
            try:
                windows[name] = Window(turns, mpi, size, allocated)
            except mpi.Exception as error:
                missing[name] = str(error).splitlines()[0]
        ways: dict[str, list[Results]] = {name: [] for name in (*ALONE, *BESIDE)}
        for _ in range(chosen.rounds):
            for name in ALONE:
                window = windows.get(name if name != "get_calls" else "get")
                if name == "nobody" or window is not None:
                    ways[name].append(turns.take(window.get if window else None, name == "get_calls"))
            hvd.init()
            snapshots = Snapshots(size)
            ways["snapshot"].append(turns.take(partial(snapshots.pull, 1), False))
            if "get" in windows:
                ways["get_beside"].append(turns.take(windows["get"].get, False))
            snapshots.close()
            hvd.shutdown()
        closed = [window.close() for window in windows.values()]
        right = turns.rank == 1 or all(closed)
        sizes.append({"bytes": size, "ways": {name: found for name, found in ways.items() if found}, "right": right})
    found: Results = {"cores_per_rank": len(os.sched_getaffinity(0)), "sizes": sizes, "missing": missing}
    return found | {"library": str(mpi.Get_library_version().split(",")[0].strip(" \0\n"))}


def main(argv: Sequence[str] | None = None) -> int:
    """Run on both ranks."""
    options = argparse.ArgumentParser(prog="scheduled_pull_one_sided_worker", description=__doc__)
    options.add_argument("--sizes", type=int, nargs="+", required=True, metavar="N", help="bytes to get")
    options.add_argument("--turn-ms", type=float, required=True, metavar="MS", help="that rank 1 computes")
    options.add_argument("--rounds", type=int, required=True, metavar="N", help="turns of each way")
    chosen = options.parse_args(argv)
    torch.set_num_threads(1)
    expected = len(chosen.sizes) * chosen.rounds * len((*ALONE, *BESIDE)) * 2 * chosen.turn_ms / 1e3
    with suppress(Exception):
        faulthandler.dump_traceback_later(expected + _TORN_DOWN, exit=True)
    try:
        from mpi4py import MPI
    except ImportError:
        print(json.dumps({"missing": {"mpi4py": "not installed"}, "sizes": []}), flush=True)
        return 0
    found = measure(MPI, chosen)
    if MPI.COMM_WORLD.rank == 0:
        print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
