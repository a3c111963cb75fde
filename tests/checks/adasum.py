"""Adasum against a float64 model of its formula, and the properties that follow from the formula."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import sordino.torch as hvd
from checks.reference import FLOATS, values
from checks.registry import Seat, check
from sordino.errors import UsageError


def merge(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    dot, aa, bb = (a * b).sum(), (a * a).sum(), (b * b).sum()
    left = 1 - dot / (2 * aa) if aa > 0 else 1.0
    right = 1 - dot / (2 * bb) if bb > 0 else 1.0
    return left * a + right * b


def model(vectors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return Adasum by a binary tree; ranks beyond the largest power of two are first merged into the lower ranks."""
    level = [vector.double() for vector in vectors]
    power = 1 << (len(level).bit_length() - 1)
    for extra in range(power, len(level)):
        level[extra - power] = merge(level[extra - power], level[extra])
    level = level[:power]
    while len(level) > 1:
        level = [merge(level[i], level[i + 1]) for i in range(0, len(level), 2)]
    return level[0]


@check(dtype=FLOATS, length=(0, 1, 3, 1000, 70001))
def follows_the_formula(seat: Seat, dtype: torch.dtype, length: int) -> None:
    inputs = [values(rank, length, dtype) + 0.3 for rank in range(seat.size)]
    result = hvd.allreduce(inputs[seat.rank], op=hvd.Adasum)
    assert result.dtype == dtype
    slack = torch.finfo(dtype).eps * 4 * seat.size
    torch.testing.assert_close(result.double(), model(inputs), atol=slack * 3, rtol=slack)
    seat.same("adasum", result)
    mine = inputs[seat.rank].clone()
    assert hvd.allreduce_(mine, op=hvd.Adasum) is mine
    seat.same("in place", mine)
    assert torch.equal(mine, result)


@check()
def weighs_each_tensor_by_itself(seat: Seat) -> None:
    """Each tensor gets its own weights, also where tensors are adjacent in memory or have mixed dtypes."""
    flat = [values(rank, 3000, torch.float64, seed=4) for rank in range(seat.size)]
    cuts = [1, 999, 2000]
    parts = [torch.split(vector, cuts) for vector in flat]
    wanted = [model([part[i] for part in parts]) for i in range(len(cuts))]
    for result, right in zip(hvd.grouped_allreduce(list(parts[seat.rank]), op=hvd.Adasum), wanted):
        torch.testing.assert_close(result, right)
    mixed = [parts[seat.rank][1].float(), parts[seat.rank][2]]
    for result, right in zip(hvd.grouped_allreduce(mixed, op=hvd.Adasum), wanted[1:]):
        torch.testing.assert_close(result.double(), right, atol=1e-5, rtol=1e-5)
    handles = [hvd.allreduce_async(part, op=hvd.Adasum, name=f"p{i}") for i, part in enumerate(parts[seat.rank])]
    for handle, right in zip(handles, wanted):
        torch.testing.assert_close(hvd.synchronize(handle), right)


@check()
def orthogonal_vectors_add_and_equal_ones_average(seat: Seat) -> None:
    unit = torch.zeros(seat.size, dtype=torch.float64)
    unit[seat.rank] = float(seat.rank + 1)
    assert hvd.allreduce(unit, op=hvd.Adasum).tolist() == [float(rank + 1) for rank in range(seat.size)]
    same = values(7, 100, torch.float64)
    torch.testing.assert_close(hvd.allreduce(same, op=hvd.Adasum), same, atol=1e-12, rtol=1e-12)
    zero = torch.zeros(5) if seat.rank else torch.ones(5)
    assert hvd.allreduce(zero, op=hvd.Adasum).tolist() == [1.0] * 5


@check()
def scales(seat: Seat) -> None:
    inputs = [values(rank, 40, torch.float64) for rank in range(seat.size)]
    result = hvd.allreduce(inputs[seat.rank], op=hvd.Adasum, prescale_factor=2.0, postscale_factor=0.25)
    torch.testing.assert_close(result, model([2 * vector for vector in inputs]) * 0.25)


@check()
def tiny_and_huge_values(seat: Seat) -> None:
    """Equal vectors are averaged at any magnitude: neither dot products nor their quotient may overflow to NaN."""
    for dtype in FLOATS:
        info = torch.finfo(dtype)
        least = 1e-100 if dtype == torch.float64 else info.smallest_normal * 4  # its square is still a float64
        for size in (least, info.max**0.45):
            mine = torch.full((50,), size, dtype=dtype)
            result = hvd.allreduce(mine, op=hvd.Adasum)
            assert result.isfinite().all(), (dtype, size, result[0])
            torch.testing.assert_close(result / size, mine / size, atol=0, rtol=info.eps * 4)


@check()
def needs_floats(seat: Seat) -> None:
    for dtype in (torch.int32, torch.bool):
        try:
            hvd.allreduce(torch.ones(3).to(dtype), op=hvd.Adasum)
        except UsageError as error:
            assert "floating" in str(error)
        else:
            raise AssertionError("Adasum of integers")
