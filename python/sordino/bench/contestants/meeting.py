"""Meeting of the ranks of a job in shared memory.

It is the same for all contestants, so the blocks of all start in the same way.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

_WORDS = 16  # 8-byte words per rank: two cache lines, because neighboring lines are often fetched together


def make(path: Path, ranks: int) -> None:
    """Create the file in which the ranks of a job meet."""
    path.write_bytes(bytes(8 * _WORDS * ranks))


class Meeting:
    """One rank's view of the meeting. All methods are collective.

    Each rank owns two words: the number of barriers that it has entered, and a value for `maximum`.

    Args:
        path: the file that `make` has created.
        rank: number of this rank.
        ranks: number of ranks.
    """

    def __init__(self, path: Path, rank: int, ranks: int) -> None:
        with path.open("r+b") as file:
            memory = memoryview(mmap.mmap(file.fileno(), 0))
        self._counts, self._values = memory.cast("Q"), memory.cast("d")
        self._own = rank * _WORDS
        self._others = [other * _WORDS for other in range(ranks) if other != rank]
        self._entered = 0

    def barrier(self) -> None:
        """Wait until all ranks have called this. With a core per rank, they leave within about 1 us of each other."""
        self._entered += 1
        self._counts[self._own] = self._entered
        for other in self._others:
            while self._counts[other] < self._entered:
                os.sched_yield()

    def maximum(self, value: float) -> float:
        """Return the largest value of all ranks."""
        self._values[self._own + 1] = value
        self.barrier()
        largest = max(value, *(self._values[other + 1] for other in self._others))
        self.barrier()  # No rank overwrites its value before all have read it.
        return largest
