"""A single copy by the kernel (process_vm_readv) compared with two copies through shared memory.

  python benchmarks/single_copy.py

Both methods bring a tensor of another process into this one. The kernel reads the tensor in place. Without this call,
its owner copies it to shared memory, in chunks that stay in the cache, and this process copies it from there. Here one
process makes both copies in turn. Two ranks make them at the same time, so the measured time is an upper bound.
"""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
from collections.abc import Sequence

import numpy as np

from sordino.bench import command_line
from sordino.report import Results, machines, records
from sordino.timing import Participants, Run, Watch, race
from timings.transports.single_copy import REPORTS

SIZES = "16KiB,64KiB,256KiB,1MiB,4MiB,64MiB"
CHUNK, SLOTS = 256 * 1024, 4  # as in the core


class _Vector(ctypes.Structure):
    """struct iovec."""

    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def kernel_copy(process: int, source: np.ndarray, target: np.ndarray) -> Run:
    """Return a function that reads into `target` the memory of a process at the address of `source`."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = target.nbytes
    local, remote = _Vector(target.ctypes.data, size), _Vector(source.ctypes.data, size)

    def run() -> None:
        got = libc.process_vm_readv(process, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
        if got != size:
            raise OSError(ctypes.get_errno(), f"process_vm_readv returned {got} instead of {size}")

    return run


def two_copies(source: np.ndarray, slots: np.ndarray, target: np.ndarray) -> Run:
    """Return a function that copies `source` to `target` through the slots, chunk by chunk."""
    chunk = min(CHUNK, max(len(source) // SLOTS, 32 * 1024))
    parts = [slice(begin, begin + chunk) for begin in range(0, len(source), chunk)]
    places = [slots[number % SLOTS * CHUNK :][: len(source[part])] for number, part in enumerate(parts)]

    def run() -> None:
        for part, place in zip(parts, places):
            np.copyto(place, source[part])
            np.copyto(target[part], place)

    return run


def measure(size: int, budget: float) -> Results:
    """Measure one size, with a sleeping child process that owns the source."""
    source, target = np.arange(size, dtype=np.uint8), np.zeros(size, np.uint8)
    slots = np.frombuffer(mmap.mmap(-1, SLOTS * CHUNK), np.uint8)
    slots[:] = 0
    asleep = multiprocessing.get_context("fork").Event()
    child = os.fork()
    if child == 0:
        asleep.wait()
        os._exit(0)
    try:
        runs = {"kernel": kernel_copy(child, source, target), "slots": two_copies(source, slots, target)}
        for run in runs.values():
            target[:] = 0
            run()
            if not np.array_equal(source, target):
                raise RuntimeError("a copy differs from its source")
        samples = race(runs, Participants(), budget)
    finally:
        asleep.set()
        os.waitpid(child, 0)
    return {"bytes": size, "contestants": {name: one.summary() for name, one in samples.items()}}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark in this process."""
    options = command_line.parser("single_copy", __doc__, 3.0, "size")
    options.add_argument("--sizes", default=SIZES, metavar="LIST", help=f"bytes (default {SIZES})")
    chosen = options.parse_args(argv)
    machine, watch = machines.machine(None), Watch(Participants())
    sizes = [command_line.parse_bytes(text) for text in chosen.sizes.split(",")]
    rows = [measure(size, 0.05 if chosen.quick else chosen.budget) for size in sizes]
    machine["others"] = watch.others()
    results: Results = {"benchmark": "single_copy", "name": "single_copy", "machine": machine, "rows": rows}
    records.publish(results, command_line.results_folder(chosen), REPORTS)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
