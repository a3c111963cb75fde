"""Cost of writing memory that another process has read, with ordinary and with streaming stores.

  python benchmarks/cache_lines.py

Two processes exchange data as ranks of a node do. Each process writes a message to its own slots in shared memory,
waits for the other process, and copies the other's message out. The slots are a ring: message n + 1 lies behind message
n. A row has the bytes of a message and of a ring, and the seconds to write and to read a message.

The result depends on whether the two cores share a cache, and a hypervisor may move them at any time. So each row is
measured in many short turns, and each turn counts as `near` or `far`. It is far if, before and after it, a message that
fills a ring of 256 KiB takes at least 4 times as long to write with ordinary stores as with streaming stores.
"""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections.abc import Sequence

import numpy as np

from sordino._core import kernels
from sordino.bench import command_line
from sordino.report import Results, machines, records
from sordino.timing import Participants, Watch
from timings.transports.cache_lines import REPORTS

MESSAGES = "16KiB,64KiB,256KiB"
RINGS = "256KiB,1MiB,4MiB"
STORES = {"ordinary": False, "streaming": True}
_FAR = 4
_PROBE = 256 * 1024


class Pair:
    """Two processes, this one and its child, that run the same code.

    Args:
        largest: bytes of each process's ring.
    """

    def __init__(self, largest: int) -> None:
        self._counters = np.frombuffer(mmap.mmap(-1, 4096), np.int64)
        rings = [np.frombuffer(mmap.mmap(-1, largest), np.uint8) for _ in range(2)]
        self._parent = os.getpid()
        self.child = os.fork()
        self.me = int(self.child == 0)
        if hasattr(os, "sched_setaffinity"):
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[self.me % len(cores)]})
        self.own, self.other = rings[self.me], rings[1 - self.me]
        self.own[:] = self.me + 1
        self._met = 0
        self._message, self._copy = np.full(largest, self.me + 1, np.uint8), np.zeros(largest, np.uint8)

    def meet(self) -> None:
        """Wait for the other process. Counters are 64 bytes apart, so each has its own cache line."""
        self._met += 1
        self._counters[8 * self.me] = self._met
        turns = 0
        while self._counters[8 * (1 - self.me)] < self._met:
            turns += 1
            if turns % 100_000 == 0 and self.me == 1 and os.getppid() != self._parent:
                os._exit(1)

    def agree(self, mine: bool) -> bool:
        """Return process 0's value in both processes."""
        if self.me == 0:
            self._counters[16] = mine
        self.meet()
        agreed = bool(self._counters[16])
        self.meet()
        return agreed

    def exchange(self, size: int, ring: int, streaming: bool, times: int) -> tuple[float, float]:
        """Exchange messages, twice around the ring and then `times` more.

        Returns:
            The median seconds to write and to read one of these `times` messages.
        """
        kernels.set_streams(streaming)
        written, read, cells = [], [], ring // size
        for number in range(2 * cells + times):
            at = number % cells * size
            self.meet()
            begin = time.perf_counter()
            kernels.publish(self.own.ctypes.data + at, self._message.ctypes.data, size)
            middle = time.perf_counter()
            self.meet()
            again = time.perf_counter()
            np.copyto(self._copy[:size], self.other[at : at + size])
            end = time.perf_counter()
            written.append(middle - begin)
            read.append(end - again)
        return statistics.median(written[-times:]), statistics.median(read[-times:])

    def is_far(self) -> bool:
        """Return whether the two cores share no cache, by the times of process 0."""
        ordinary, streaming = (self.exchange(_PROBE, _PROBE, stores, 5)[0] for stores in (False, True))
        return self.agree(ordinary >= _FAR * streaming)

    def end(self) -> None:
        """End the child, and wait for it in the parent."""
        if self.me == 1:
            os._exit(0)
        os.waitpid(self.child, 0)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark in this process and a child."""
    options = command_line.parser("cache_lines", __doc__, 60.0, "seconds in all")
    options.add_argument("--messages", default=MESSAGES, metavar="LIST", help=f"bytes (default {MESSAGES})")
    options.add_argument("--rings", default=RINGS, metavar="LIST", help=f"bytes (default {RINGS})")
    chosen = options.parse_args(argv)
    machine, watch = machines.machine(None), Watch(Participants())
    sizes, rings = (
        [command_line.parse_bytes(text) for text in listed.split(",")] for listed in (chosen.messages, chosen.rings)
    )
    kinds = [(size, ring, stores) for ring in rings for size in sizes if size <= ring for stores in STORES]
    pair = Pair(max([_PROBE, *rings]))
    samples: dict[tuple[int, int, str, str], list[tuple[float, float]]] = {}
    deadline = time.monotonic() + (0.2 if chosen.quick else chosen.budget)
    turns = 0
    while pair.agree(turns == 0 or time.monotonic() < deadline):
        turns += 1
        far = pair.is_far()
        for size, ring, stores in kinds:
            sample = pair.exchange(size, ring, STORES[stores], 9)
            before, far = far, pair.is_far()
            if before == far:
                samples.setdefault((size, ring, stores, "far" if far else "near"), []).append(sample)
    pair.end()
    others = watch.others()
    machine["others"] = None if others is None else max(0.0, others - 1)  # less the child, which is never idle
    rows = [
        {
            "bytes": size,
            "ring": ring,
            "stores": stores,
            "place": place,
            "turns": len(taken),
            "write": statistics.median(write for write, _ in taken),
            "read": statistics.median(read for _, read in taken),
        }
        for (size, ring, stores, place), taken in sorted(samples.items())
    ]
    results: Results = {"benchmark": "cache_lines", "name": "cache_lines", "machine": machine, "rows": rows}
    records.publish(results, command_line.results_folder(chosen), REPORTS)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
