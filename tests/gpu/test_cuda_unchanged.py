"""Counting what a step left unchanged: the GPU's counts, copies, counters and indices are the CPU's."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from checks.reference import DTYPES, FLOATS
from places import PHASES, Place, content, phase, raw

from sordino._core import cuda_kernels, kernels
from sordino.errors import UsageError
from sordino.runtime.dtypes import DTYPE_CODES

pytestmark = pytest.mark.gpu

COUNTS = (0, 1, 7, 63, 64, 1003, 70001)
RATIO = 0.03


@pytest.fixture(scope="module")
def cuda():
    return cuda_kernels.CudaKernels(0)


def items(dtype: torch.dtype, ratio: float = RATIO):
    """Return items for tensors that are back to back."""
    starts = np.cumsum([0, *COUNTS])
    return kernels.Items([(int(at) * dtype.itemsize, n, DTYPE_CODES[dtype]) for at, n in zip(starts, COUNTS)], ratio)


def stepped(before: torch.Tensor, seed: int) -> torch.Tensor:
    """Return values after a step: half of them unchanged, the others near the old ones or different."""
    rng, count = np.random.default_rng(seed), before.numel()
    now = content(1, count, before.dtype, seed)
    if before.dtype in FLOATS:
        near = torch.from_numpy(rng.standard_normal(count) * 10.0 ** -rng.integers(1, 9, count))
        now = torch.where(torch.from_numpy(rng.random(count) < 0.7), (before.double() + near).to(before.dtype), now)
    same = torch.from_numpy(rng.random(count) < 0.5)
    raw(now).view(count, -1)[same] = raw(before).view(count, -1)[same]
    return now


def steps(dtype: torch.dtype) -> Iterator[tuple[int, str]]:
    for digits in (-1, 0, 3, 15) if dtype in FLOATS else (-1,):
        for kind in PHASES:
            yield digits, kind


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_elements(cuda, dtype: torch.dtype) -> None:
    table, total = items(dtype), sum(COUNTS)
    for digits, kind in steps(dtype):
        start = content(0, total, dtype, digits + 1)
        now = stepped(start, digits + 1)
        seen = torch.from_numpy(np.random.default_rng(0).choice([0, 1, 100, 252, 253], total).astype(np.uint8))
        seen[-1] = seen[-COUNTS[-1] - 1] = 255
        seen[1:8] = 254
        for counting in (False, True):
            theirs, their_seen, expected = start.clone(), seen.clone(), torch.zeros(len(COUNTS), dtype=torch.int64)
            places = [Place(one, phase(kind, k, dtype)) for k, one in enumerate((now, start))]
            counters, found = Place(seen, 3), Place(torch.full((len(COUNTS),), -1))
            table.unchanged(
                now.data_ptr(), theirs.data_ptr(), expected.data_ptr(), digits, their_seen.data_ptr() * counting
            )
            cuda.unchanged(
                table, places[0].address, places[1].address, found.address, digits, counters.address * counting
            )
            assert torch.equal(found.take(), expected), (digits, kind, counting)
            assert torch.equal(raw(places[1].take()), raw(theirs)), (digits, kind, counting)
            assert torch.equal(counters.take(), their_seen), (digits, kind, counting)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_samples(cuda, dtype: torch.dtype) -> None:
    table, total = items(dtype), sum(COUNTS)
    for digits, kind in steps(dtype):
        before = content(0, total, dtype, digits + 1)
        now = stepped(before, digits + 1)
        theirs = torch.zeros(table.samples, dtype=torch.uint32), torch.zeros(table.sample_bytes, dtype=torch.uint8)
        expected = torch.zeros(len(COUNTS), dtype=torch.int64)
        indices, saved = Place(theirs[0]), Place(theirs[1], 1)  # at unaligned addresses
        found = Place(expected - 1)
        places = [Place(one, phase(kind, k, dtype)) for k, one in enumerate((now, before))]
        table.draw(17, theirs[0].data_ptr())
        cuda.draw(table, 17, indices.address)
        assert torch.equal(raw(indices.take()), raw(theirs[0]))
        table.save_at(before.data_ptr(), theirs[0].data_ptr(), theirs[1].data_ptr())
        cuda.save_at(table, places[1].address, indices.address, saved.address)
        assert torch.equal(saved.take(), theirs[1])
        at = theirs[1].data_ptr(), theirs[0].data_ptr(), expected.data_ptr()
        table.unchanged_at(now.data_ptr(), *at, digits)
        cuda.unchanged_at(table, places[0].address, saved.address, indices.address, found.address, digits)
        assert torch.equal(found.take(), expected), (digits, kind)


@pytest.mark.parametrize("ratio", [1e-3, 0.05, 0.5, 1.0])
@pytest.mark.parametrize("bounds", [(0, 1), (0, 3), (126, 130), (250, 256), (0, 256)])
def test_the_highest_counters_are_selected(cuda, ratio: float, bounds: tuple[int, int]) -> None:
    table = items(torch.float64, ratio)
    counters = torch.from_numpy(np.random.default_rng(1).integers(*bounds, sum(COUNTS), dtype=np.uint8))
    expected = torch.zeros(table.samples, dtype=torch.uint32)
    table.select(counters.data_ptr(), expected.data_ptr())
    for shift in (0, 1, 8, 15):
        ours, found = Place(counters, shift), Place(torch.zeros_like(expected))
        cuda.select(table, ours.address, found.address)
        assert torch.equal(raw(found.take()), raw(expected)), shift


def test_types_side_by_side(cuda) -> None:
    """Items of all types in one call; a sample may have an unaligned address."""
    specs, at = [], 0
    for dtype in DTYPES:
        at += -at % 8
        specs.append((at, 1001, DTYPE_CODES[dtype]))
        at += 1001 * dtype.itemsize
    table = kernels.Items(specs, 0.1)
    before, now = (torch.from_numpy(np.random.default_rng(k).integers(0, 2, at, dtype=np.uint8)) for k in range(2))
    now[::3] = before[::3]
    expected = torch.zeros(len(specs), dtype=torch.int64)
    theirs = torch.zeros(table.samples, dtype=torch.uint32), torch.zeros(table.sample_bytes, dtype=torch.uint8)
    ours, then, found = Place(now), Place(before), Place(expected - 1)
    indices, saved = Place(theirs[0]), Place(theirs[1])
    table.draw(3, theirs[0].data_ptr())
    table.save_at(before.data_ptr(), theirs[0].data_ptr(), theirs[1].data_ptr())
    cuda.draw(table, 3, indices.address)
    cuda.save_at(table, then.address, indices.address, saved.address)
    assert torch.equal(saved.take(), theirs[1])
    table.unchanged_at(now.data_ptr(), theirs[1].data_ptr(), theirs[0].data_ptr(), expected.data_ptr())
    cuda.unchanged_at(table, ours.address, saved.address, indices.address, found.address)
    assert torch.equal(found.take(), expected)
    table.unchanged(now.data_ptr(), before.data_ptr(), expected.data_ptr())
    cuda.unchanged(table, ours.address, then.address, found.address)
    assert torch.equal(found.take(), expected) and torch.equal(then.take(), before)


def test_what_is_refused(cuda) -> None:
    for run in (lambda digits: cuda.unchanged(items(torch.int32), 0, 0, 0, digits),
                lambda digits: cuda.unchanged_at(items(torch.int32), 0, 0, 0, 0, digits)):  # fmt: skip
        with pytest.raises(UsageError, match="int32"):
            run(3)
        with pytest.raises(UsageError, match="16 digits"):
            run(16)


def test_no_items(cuda) -> None:
    none = kernels.Items([], 0.5)
    cuda.unchanged(none, 0, 0, 0, 15)
    cuda.draw(none, 1, 0)
    cuda.select(none, 0, 0)
    cuda.save_at(none, 0, 0, 0)
    cuda.unchanged_at(none, 0, 0, 0, 0, 15)
