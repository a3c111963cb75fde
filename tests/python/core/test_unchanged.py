"""Counting elements that a step left unchanged: against NumPy, at every instruction set level, all elements and
samples."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from checks.levels import levels
from checks.reference import DTYPES, FLOATS, values
from hypothesis import given
from hypothesis import strategies as st

from sordino._core import kernels
from sordino.errors import UsageError
from sordino.runtime.dtypes import DTYPE_CODES

COUNTS = (0, 1, 7, 63, 64, 1003)
EDGES = (
    0.0,
    -0.0,
    math.inf,
    -math.inf,
    math.nan,
    1e30,
    -1e30,
    1.5e30,
    1e-40,
    6e-8,
    5e-324,
    8388608.0,
    4194303.5,
    2.0**52,
)


pytestmark = pytest.mark.usefixtures("level_as_before")


def items(counts: Sequence[int], dtype: torch.dtype, ratio: float = 1.0):
    """Return items for tensors that are back to back."""
    starts = np.concatenate([[0], np.cumsum(counts)])
    table = [(int(start) * dtype.itemsize, count, DTYPE_CODES[dtype]) for start, count in zip(starts, counts)]
    return kernels.Items(table, ratio)


def split(array: np.ndarray, counts: Sequence[int]) -> list[np.ndarray]:
    return np.split(array, np.cumsum(counts))[:-1]


def bits(tensor: torch.Tensor) -> np.ndarray:
    flat = tensor.view(torch.uint8).numpy() if tensor.numel() else np.zeros(0, np.uint8)
    return flat.reshape(-1, tensor.dtype.itemsize)


def same(now: torch.Tensor, before: torch.Tensor, digits: int) -> np.ndarray:
    """Return flags of the unchanged elements, by NumPy; bool [elements]."""
    equal = np.all(bits(now) == bits(before), axis=1)
    if digits < 0:
        return equal
    precision, limit = (np.float64, 2.0**52) if now.dtype == torch.float64 else (np.float32, 2.0**23)
    scale = precision(10.0**digits)
    with np.errstate(all="ignore"):
        a, b = (tensor.to(torch.float64).numpy().astype(precision) * scale for tensor in (now, before))
        near = (np.abs(a) < limit) & (np.abs(b) < limit) & (np.rint(a) == np.rint(b))
    return equal | near


def step(count: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values after and before a step: equal ones, near ones, ones next to a tie, edge cases and other ones."""
    rng = np.random.default_rng([seed, count])
    before, now = values(0, count, dtype, seed), values(1, count, dtype, seed)
    kept = rng.random(count) < 0.5
    if dtype in FLOATS:
        near = torch.from_numpy(rng.standard_normal(count) * 10.0 ** -rng.integers(1, 9, count))
        now = torch.where(torch.from_numpy(rng.random(count) < 0.5), (before.double() + near).to(dtype), now)
        halves = torch.from_numpy(rng.integers(-9, 9, (2, count)) / 2).to(dtype)
        edges = torch.from_numpy(rng.choice(EDGES, (2, count))).to(dtype)
        for chosen, draws in ((rng.random(count) < 0.2, halves), (rng.random(count) < 0.2, edges)):
            mask = torch.from_numpy(chosen)
            before, now = torch.where(mask, draws[0], before), torch.where(mask, draws[1], now)
    bits(now)[kept] = bits(before)[kept]
    return now, before


@pytest.mark.parametrize("digits", [-1, 0, 1, 4, 10, 15])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_elements(dtype: torch.dtype, digits: int) -> None:
    table, total = items(COUNTS, dtype), sum(COUNTS)
    assert table.elements == table.samples == total and table.sample_bytes == total * dtype.itemsize
    now, start = step(total, dtype, digits + 1)
    found = torch.zeros(len(COUNTS), dtype=torch.int64)
    if digits >= 0 and dtype not in FLOATS:
        with pytest.raises(UsageError, match=f"item 0 is {str(dtype).removeprefix('torch.')}"):
            table.unchanged(now.data_ptr(), start.data_ptr(), found.data_ptr(), digits)
        return
    unchanged = same(now, start, digits)
    assert 0 < unchanged.sum() < total
    expected = [int(part.sum()) for part in split(unchanged, COUNTS)]
    seen = np.random.default_rng(0).choice([0, 1, 100, 252, 253], total).astype(np.uint8)
    seen[-1], seen[-COUNTS[-1] - 1] = 255, 254
    for level in levels():
        before, counters = start.clone(), torch.from_numpy(seen.copy())
        table.unchanged(now.data_ptr(), before.data_ptr(), found.data_ptr(), digits, counters.data_ptr())
        assert found.tolist() == expected, level
        assert np.array_equal(bits(before), bits(now)), level
        for part in split(np.where(unchanged | (seen == 255), seen, seen + 1), COUNTS):
            assert np.array_equal(counters[: len(part)].numpy(), part // 2 if 255 in part else part), level
            counters = counters[len(part) :]
        table.unchanged(now.data_ptr(), before.data_ptr(), found.data_ptr(), digits)
        assert found.tolist() == list(COUNTS), level


@pytest.mark.parametrize(
    ("now", "before", "digits", "unchanged"),
    [
        (-0.0, 0.0, -1, False),
        (-0.0, 0.0, 0, True),
        (-0.3, 0.3, 0, True),
        (math.nan, math.nan, -1, True),
        (math.nan, math.nan, 3, True),
        (math.nan, 0.0, 3, False),
        (math.inf, math.inf, 10, True),
        (math.inf, -math.inf, 10, False),
        (1e30, 1.5e30, 10, False),  # both overflow when scaled
        (1e30, math.inf, 10, False),
        (0.5, 1.5, 0, False),  # ties to even: 0 and 2
        (1.5, 2.5, 0, True),
        (2.0**-130, -(2.0**-140), 15, True),
        (1.00004, 1.00001, 4, True),
        (1.00004, 1.00006, 4, False),
    ],
)
def test_one_element(now: float, before: float, digits: int, unchanged: bool) -> None:
    for dtype in (torch.float32, torch.float64):
        table, found = items([1], dtype), torch.zeros(1, dtype=torch.int64)
        for level in levels():
            ours, theirs = torch.tensor([now], dtype=dtype), torch.tensor([before], dtype=dtype)
            table.unchanged(ours.data_ptr(), theirs.data_ptr(), found.data_ptr(), digits)
            assert found.item() == unchanged, level


@given(
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 300), max_size=6),
    st.integers(0, 7),
    st.integers(-1, 6),
    st.floats(1e-3, 1),
    st.integers(0, 1000),
)
def test_samples_at_any_address(dtype, counts, shift, digits, ratio, seed) -> None:
    digits = digits if dtype in FLOATS else -1
    table, total = items(counts, dtype, ratio), sum(counts)
    wanted = [min(count, max(1, math.ceil(ratio * count))) for count in counts]
    assert table.sample_counts == wanted and table.samples == sum(wanted)
    assert table.sample_bytes == sum(wanted) * dtype.itemsize
    now, before = step(total, dtype, seed)
    sizes = (total * dtype.itemsize, total * dtype.itemsize, 4 * table.samples, table.sample_bytes, 8 * len(counts))
    places = [np.zeros(size + 8, np.uint8)[shift : shift + size] for size in sizes]
    places[0][:], places[1][:] = bits(now).reshape(-1), bits(before).reshape(-1)
    at_now, at_before, indices, saved, results = (place.ctypes.data for place in places)
    table.draw(seed, indices)
    table.save_at(at_before, indices, saved)
    table.unchanged_at(at_now, saved, indices, results, digits)
    chosen, found = places[2].copy().view(np.uint32), places[4].copy().view(np.int64)
    firsts = np.repeat(np.cumsum([0, *counts])[:-1], wanted)
    everywhere = chosen + firsts.astype(np.int64)
    assert np.array_equal(places[3], bits(before)[everywhere].reshape(-1))
    unchanged = same(now, before, digits)[everywhere]
    assert found.tolist() == [int(part.sum()) for part in split(unchanged, wanted)]


def drawn(table, key: int) -> np.ndarray:
    indices = np.zeros(table.samples, np.uint32)
    table.draw(key, indices.ctypes.data)
    return indices


def test_draws_are_stratified() -> None:
    counts = (1, 10, 1000, 4097)
    table = items(counts, torch.float32, 0.03)
    assert np.array_equal(drawn(table, 5), drawn(table, 5))
    assert not np.array_equal(drawn(table, 5), drawn(table, 6))
    for key in range(50):
        for count, part in zip(counts, split(drawn(table, key), table.sample_counts)):
            stretch = count / len(part)
            borders = np.arange(len(part)) * stretch
            assert np.all((part + 1 > borders) & (part < borders + stretch)), "one from each stretch"
            assert np.all(np.diff(part.astype(np.int64)) >= 0) and part.max() < count
    assert np.array_equal(drawn(items(counts, torch.int8), 3), np.concatenate([np.arange(count) for count in counts]))


def test_draws_estimate_without_bias() -> None:
    count, keys = 3001, 4000
    table = items([count], torch.float32, 0.02)
    samples = table.samples
    rng = np.random.default_rng(1)
    for pattern in (rng.random(count) < 0.3, np.arange(count) < 700, np.arange(count) % 50 == 0):
        estimates = np.array([pattern[drawn(table, key)].mean() for key in range(keys)])
        share = pattern.mean()
        most = math.sqrt(share * (1 - share) / samples)
        assert abs(estimates.mean() - share) < 4 * most / math.sqrt(keys)
        assert estimates.std() < most * (1 + 4 / math.sqrt(2 * keys))


@given(
    st.lists(st.integers(0, 200), max_size=5),
    st.sampled_from([1e-3, 0.05, 0.5, 1.0]),
    st.sampled_from([(0, 1), (0, 3), (126, 130), (250, 256), (0, 256)]),
    st.integers(0, 1000),
)
def test_the_highest_counters_are_selected(counts, ratio, bounds, seed) -> None:
    table = items(counts, torch.float64, ratio)
    counters = np.random.default_rng(seed).integers(*bounds, sum(counts), dtype=np.uint8)
    indices = np.zeros(table.samples, np.uint32)
    table.select(counters.ctypes.data, indices.ctypes.data)
    for found, part in zip(split(indices, table.sample_counts), split(counters, counts)):
        order = np.argsort(-part.astype(int), kind="stable")
        assert np.array_equal(found, np.sort(order[: len(found)]))


def test_a_hot_set_is_selected() -> None:
    table = items([100_000], torch.float32, 0.01)
    hot = np.sort(np.random.default_rng(0).choice(100_000, 1000, replace=False))
    counters = np.random.default_rng(1).integers(0, 200, 100_000, dtype=np.uint8)
    counters[hot] = np.random.default_rng(2).integers(200, 256, 1000)
    indices = np.zeros(1000, np.uint32)
    table.select(counters.ctypes.data, indices.ctypes.data)
    assert np.array_equal(indices, hot)


def test_what_is_refused() -> None:
    for ratio in (0.0, -0.5, 1.5, math.nan):
        with pytest.raises(UsageError, match="ratio"):
            kernels.Items([(0, 4, 0)], ratio)
    for code in (-1, len(DTYPES)):
        with pytest.raises(UsageError, match=f"type code {code}"):
            kernels.Items([(0, 4, code)])
    with pytest.raises(UsageError, match="item 1 has 4294967296 elements"):
        kernels.Items([(0, 4, 1), (4, 2**32, 1)])
    mixed = kernels.Items([(0, 0, DTYPE_CODES[torch.float32]), (0, 0, DTYPE_CODES[torch.int32])])
    found = torch.zeros(2, dtype=torch.int64)
    for count in (
        lambda digits: mixed.unchanged(0, 0, found.data_ptr(), digits),
        lambda digits: mixed.unchanged_at(0, 0, 0, found.data_ptr(), digits),
    ):
        count(-1)
        with pytest.raises(UsageError, match="item 1 is int32"):
            count(0)
        with pytest.raises(UsageError, match="16 digits"):
            count(16)
