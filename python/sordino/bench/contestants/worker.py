"""One rank of a job that measures one contestant. `launching` starts it; each rank writes its times to a file of JSON.

A measurement consists of blocks. Before each block the ranks pass the library's own barrier, so that the library
completes unfinished sends, and then the barrier in shared memory, which is the same for all contestants. Up to 16 KiB a
block is a loop of 100 calls, and its time is divided by 100, as in the OSU micro-benchmarks: one call would take no
longer than the start of the block. A larger size has one call per block. So has a broadcast: in a loop its root would
run ahead of the other ranks, and the time would be that of a pipeline.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

import torch

from sordino.bench.contestants.libraries import LIBRARIES, Call, Library
from sordino.bench.contestants.meeting import Meeting
from sordino.bench.contestants.operations import elements, fill, is_right

_LOOPED = 16 << 10  # largest size in bytes whose calls are timed in loops
_CALLS = 100  # calls of a loop
_LEAST, _MOST = 5, 500  # blocks of a measurement
_WARMUP = 0.2  # part of the budget


def measure(library: Library, meeting: Meeting, operation: str, size: int, budget: float) -> dict[str, Any] | None:
    """Check one call and measure blocks for `budget` seconds; None if the library lacks the operation. Collective."""
    given, received = elements(operation, size, library.ranks)
    source, result = library.empty(given), library.empty(received)
    run = library.prepare(operation, source, result)
    if run is None:
        return None
    fill(operation, source, library.rank, library.ranks)
    found, right = run(), True
    if library.communicates and operation != "barrier":
        right = is_right(operation, found, library.rank, library.ranks)
    del found
    source.zero_()  # Sums of zeros do not grow.
    calls = _CALLS if size <= _LOOPED and operation != "broadcast" else 1
    _blocks(library, meeting, run, calls, budget * _WARMUP)
    seconds = _blocks(library, meeting, run, calls, budget)
    return {"operation": operation, "bytes": size, "right": right, "calls": calls, "seconds": seconds}


def _blocks(library: Library, meeting: Meeting, run: Call, calls: int, budget: float) -> list[float]:
    """Return this rank's seconds per call of each block. All ranks make the same number of blocks."""
    clock = time.perf_counter
    found: list[float] = []
    begin = clock()
    while len(found) < _LEAST or (len(found) < _MOST and meeting.maximum(clock() - begin) < budget):
        library.barrier()
        meeting.barrier()
        start = clock()
        for _ in repeat(None, calls):
            run()
        found.append((clock() - start) / calls)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all operations and sizes, and write the rank's times to the folder."""
    options = argparse.ArgumentParser(prog="worker", description=__doc__)
    options.add_argument("--library", choices=LIBRARIES, required=True)
    options.add_argument("--rows", required=True, help="JSON: list of operation and size")
    options.add_argument("--budget", type=float, required=True, help="seconds per row")
    options.add_argument("--folder", type=Path, required=True, help="folder with the meeting, and for the times")
    chosen = options.parse_args(argv)
    torch.set_num_threads(1)
    library = LIBRARIES[chosen.library]()
    meeting = Meeting(chosen.folder / "meeting", library.rank, library.ranks)
    rows = [measure(library, meeting, operation, size, chosen.budget) for operation, size in json.loads(chosen.rows)]
    times = {"version": library.version, "rows": [row for row in rows if row is not None]}
    (chosen.folder / f"{library.rank}.json").write_text(json.dumps(times))
    library.barrier()
    meeting.barrier()  # No rank leaves while another still waits in the library's barrier.
    library.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
