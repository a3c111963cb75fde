"""The pool of shared memory of a process group, on ranks that are threads."""

from __future__ import annotations

import threading

import torch

from sordino import sim
from sordino.distributed.shared_memory import MemoryPool, _rounded
from sordino.runtime.context import current

KIB = 1024


def test_segments_are_reused_and_bounded() -> None:
    def work() -> None:
        pool = MemoryPool(current())
        world = current().world

        def bytes_of(count: int) -> torch.Tensor:
            return pool.allocate(count, torch.uint8)

        one, other = bytes_of(100 * KIB), bytes_of(100 * KIB)
        addresses = {one.data_ptr(), other.data_ptr()}
        assert len(addresses) == 2 and pool.segments == (2, 0)
        assert all(world.in_shared_memory(tensor.data_ptr(), tensor.nbytes) for tensor in (one, other))
        view = one[5:]
        del one, other
        assert pool.segments == (1, 1)  # a view keeps the memory
        del view
        assert pool.segments == (0, 2)
        again = [pool.allocate(25 * KIB + 7, torch.float32) for _ in range(2)]  # of nearly the same number of bytes
        assert {tensor.data_ptr() for tensor in again} == addresses and again[0].shape == (25 * KIB + 7,)
        del again
        # The limit is 416 KiB: twice the memory of the two tensors of 100 KiB, each in a segment of 104 KiB.
        for size in (40, 48, 56, 64):
            bytes_of(size * KIB)
        assert pool.segments == (0, 6)  # 416 KiB
        bytes_of(36 * KIB)
        assert pool.segments == (0, 6)  # without the segment of 104 KiB that was returned first
        assert not world.in_shared_memory(bytes_of(31 * KIB).data_ptr(), 31 * KIB)
        kept = bytes_of(64 * KIB).fill_(3)
        pool.close()
        assert bool((kept == 3).all()) and pool.segments == (0, 0)

    sim.run(1, work)


def test_tensors_are_freed_by_other_threads() -> None:
    def work() -> None:
        pool = MemoryPool(current())

        def use() -> None:
            for turn in range(200):
                tensor = pool.allocate((40 + turn % 5) * KIB, torch.uint8).fill_(turn)
                assert bool((tensor == turn).all())

        threads = [threading.Thread(target=use) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        used, free = pool.segments
        assert used == 0 and 1 <= free <= 17  # of 40 or 44 KiB; a thread frees a tensor after it has the next one

    sim.run(1, work)


def test_a_segment_is_at_most_an_eighth_too_large() -> None:
    for size in [*range(32 * KIB, 33 * KIB), 10**6, 10**9 + 1, 1 << 30]:
        rounded = _rounded(size)
        assert size <= rounded <= max(size * 1.125, size + 4095) and rounded % 4096 == 0
