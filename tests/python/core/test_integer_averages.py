"""Averages of integers: the sum divided by the number of ranks, truncated toward zero, for any number of ranks."""

from __future__ import annotations

import pytest
import torch

import sordino.torch as hvd
from sordino import sim

DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@pytest.mark.parametrize(("size", "nodes"), [(3, 0), (49, 0), (98, 7), pytest.param(103, 0, marks=pytest.mark.soak)])
def test_the_average_of_equal_integers_is_that_integer(size: int, nodes: int) -> None:
    """With 49, 98, 103 and 107 ranks, 1 / N is rounded down, and N times that is below 1."""

    def work() -> None:
        for dtype in DTYPES:
            for value in (0, 1, 2, *([-1, -2] if dtype.is_signed else [])):
                if abs(value) * size > torch.iinfo(dtype).max:  # sums wrap
                    continue
                ones = torch.full((size,), value, dtype=dtype)
                for _ in range(3):  # decided by the coordinator, then repeated
                    assert torch.equal(hvd.allreduce(ones, op=hvd.Average, name=f"{dtype}"), ones)
                    part = hvd.reducescatter(ones, op=hvd.Average, name=f"part.{dtype}")
                    assert torch.equal(part, ones[:1]), (dtype, value, part)

    sim.run(size, work, ranks_per_node=nodes)


def test_an_average_is_truncated_toward_zero() -> None:
    def work() -> list[int]:
        values = torch.tensor([hvd.rank() + 1, -hvd.rank() - 1, 7 * hvd.rank()], dtype=torch.int32)
        return hvd.allreduce(values, op=hvd.Average).tolist()

    assert sim.run(4, work) == [[2, -2, 10]] * 4
