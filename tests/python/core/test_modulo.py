"""Modulo codes: against integers and float64, at every instruction set level, and blocks that are too far away."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from checks.levels import levels
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from sordino._core import kernels
from sordino.errors import UsageError

pytestmark = pytest.mark.usefixtures("level_as_before")

Floats = NDArray[np.float32]
DECAY, GROWTH, LEAST, FINEST = 0.75, 2, 1 / 64, 20
COUNTS = (0, 1, 31, 32, 127, 128, 129, 1000)


class Code:
    """A codec of the core, with arrays instead of addresses."""

    def __init__(self, bits: int, block: int = 32) -> None:
        self.bits, self.block, self.reach = bits, block, 2 ** (bits - 1) - 2
        self.core = kernels.ModuloCodec(bits, block)

    def encode(self, values: Floats, distances: Floats) -> tuple[NDArray[np.uint8], int]:
        room = np.full(self.core.bytes(len(values)) + 2, 0xA5, np.uint8)
        assert len(distances) == self.core.blocks(len(values))
        infinite = self.core.encode(values.ctypes.data, len(values), distances.ctypes.data, room.ctypes.data)
        assert room[-2:].tolist() == [0xA5, 0xA5]
        return room[:-2], infinite

    def change(
        self,
        values: Floats,
        own: NDArray[np.uint8],
        sources: Sequence[NDArray[np.uint8]],
        distances: Floats,
        weight: float = 0.5,
    ) -> tuple[Floats, Floats, int]:
        """Return the changes, the new estimates and the number of missed blocks."""
        change, new = np.full(len(values) + 1, 9, np.float32), distances.copy()
        places = [one.ctypes.data for one in sources]
        into = (change.ctypes.data, new.ctypes.data)
        missed = self.core.change(values.ctypes.data, len(values), own.ctypes.data, places, weight, *into)
        assert change[-1] == 9
        return change[:-1], new, missed

    def step(self, values: Floats, distance: float) -> float:
        """Return the step of a block: its window, or the finest step, rounded up to a quarter of a power of two."""
        margin = np.float32(2 if self.bits == 4 else 3)
        least = max(float(margin * np.float32(distance) / np.float32(self.reach)), 2.0**-126)
        power = 2.0 ** np.floor(np.log2(least))
        wide = power * np.ceil(4 * (least / power)) / 4
        largest = np.abs(values.astype(np.float64)).max(initial=0)
        fine = 2.0 ** (np.floor(np.log2(largest)) - FINEST) if largest > 0 else 0
        return float(min(max(wide, fine), 2.0**126))

    def rounded(self, values: Floats, distances: Floats) -> NDArray[np.float64]:
        """Return the quantized values Q, in float64. Integers are rounded after a product in float32."""
        found = [np.zeros(0)]
        for block, distance in enumerate(distances):
            part = values[block * self.block : (block + 1) * self.block]
            step = self.step(part, distance)
            found.append(step * np.round(part * (np.float32(1) / np.float32(step))).astype(np.float64))
        return np.concatenate(found)


def draw(count: int, seed: int, size: float = 1.0) -> Floats:
    return (np.random.default_rng(seed).standard_normal(count) * size).astype(np.float32)


def estimates(code: Code, distance: float, count: int) -> Floats:
    return np.full(code.core.blocks(count), distance, np.float32)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("count", COUNTS)
def test_near_values_are_decoded_exactly_at_every_level(bits: int, count: int) -> None:
    code, x = Code(bits), draw(count, count)
    ys = [x, x + np.clip(draw(count, 1, 0.02), -0.05, 0.05), x + np.clip(draw(count, 2, 0.02), -0.05, 0.05)]
    distances = estimates(code, 0.1, count)
    seen = []
    for _ in levels():
        sent = [code.encode(y.astype(np.float32), distances) for y in ys]
        assert [infinite for _, infinite in sent] == [0, 0, 0]
        change, new, missed = code.change(ys[0], sent[0][0], [one for one, _ in sent[1:]], distances, 0.25)
        assert missed == 0
        qs = [code.rounded(y.astype(np.float32), distances) for y in ys]
        np.testing.assert_allclose(change, 0.25 * (qs[1] + qs[2] - 2 * qs[0]), rtol=0, atol=1e-7)
        for block in range(len(distances)):
            part = slice(block * code.block, (block + 1) * code.block)
            farthest = max(np.abs(q - x.astype(np.float64))[part].max() for q in qs[1:])
            np.testing.assert_allclose(new[block], max(farthest, DECAY * 0.1), rtol=1e-6)
        seen.append((*(one.tobytes() for one, _ in sent), change.tobytes(), new.tobytes()))
    assert all(one == seen[0] for one in seen)


values_near_each_other = st.integers(1, 80).flatmap(
    lambda count: st.tuples(
        arrays(np.float32, count, elements=st.floats(-1000, 1000, width=32)),
        arrays(np.float32, count, elements=st.floats(-1, 1, width=32)),
    )
)


@settings(deadline=None)
@given(values_near_each_other, st.sampled_from([4, 8]), st.floats(2**-10, 100, width=32))
def test_whatever_is_within_the_estimate_is_decoded(both: tuple[Floats, Floats], bits: int, distance: float) -> None:
    code, (x, apart) = Code(bits), both
    y = (x + apart * np.float32(distance)).astype(np.float32)
    distances = estimates(code, 1.01 * distance + 1e-3, len(x))
    sent, own = code.encode(x, distances)[0], code.encode(y, distances)[0]
    change, _, missed = code.change(y, own, [sent], distances, 1.0)
    assert missed == 0
    wanted = code.rounded(x, distances) - code.rounded(y, distances)
    np.testing.assert_allclose(change, wanted, rtol=1e-6, atol=0)
    steps = np.repeat([code.step(x[i : i + 32], 1.01 * distance + 1e-3) for i in range(0, len(x), 32)], 32)[: len(x)]
    others = np.repeat([code.step(y[i : i + 32], 1.01 * distance + 1e-3) for i in range(0, len(x), 32)], 32)[: len(x)]
    assert (np.abs(change - (x.astype(np.float64) - y)) <= (steps + others) / 2 * (1 + 1e-6)).all()


@settings(deadline=None)
@given(
    st.sampled_from([4, 8]),
    st.lists(st.tuples(st.integers(0, 31), st.integers(1, 40), st.booleans()), min_size=1, max_size=6),
)
def test_a_block_beyond_its_window_is_missed(bits: int, far: list[tuple[int, int, bool]]) -> None:
    """Wrong integers do not pass for right ones, even where they are wrong by opposite multiples of 2^bits."""
    code, x = Code(bits), draw(64, 5)
    distances = estimates(code, 0.01, 64)
    step, y = code.step(x[:32], 0.01), x.copy()
    for place, times, down in far:
        y[place] = x[place] + (-1 if down else 1) * times * step * 2**bits
    own, sent = code.encode(y, distances)[0], code.encode(x, distances)[0]
    change, new, missed = code.change(y, own, [sent], distances)
    assert missed == 1 and not change[:32].any()
    expected = max(GROWTH * code.reach * step, LEAST * np.abs(y[:32]).max(), DECAY * distances[0])
    np.testing.assert_allclose(new[0], expected, rtol=1e-6)
    assert new[1] <= 2 * distances[1]


@pytest.mark.parametrize("bits", [4, 8])
def test_a_missed_block_is_decoded_after_some_exchanges(bits: int) -> None:
    """Two workers have unrelated values, and the first estimates are 0."""
    code, workers = Code(bits), [draw(64, 1), draw(64, 2)]
    distances = [estimates(code, 0, 64), estimates(code, 0, 64)]
    misses: list[int] = []
    for _ in range(12):
        sent = [code.encode(one, there)[0] for one, there in zip(workers, distances)]
        results = [code.change(workers[i], sent[i], [sent[1 - i]], distances[i]) for i in range(2)]
        before = sum(one.astype(np.float64) for one in workers)
        workers = [one + change for one, (change, _, _) in zip(workers, results)]
        distances = [new for _, new, _ in results]
        misses.append(sum(missed for _, _, missed in results))
        if misses[-1] == 0:
            np.testing.assert_allclose(sum(one.astype(np.float64) for one in workers), before, atol=1e-5)
    assert misses[0] == 4 and misses[-4:] == [0, 0, 0, 0]
    np.testing.assert_allclose(workers[0], workers[1], atol=0.5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e38])
@pytest.mark.parametrize("whose", ["source", "own"])
def test_a_value_that_is_not_finite_or_too_large_is_nan(bad: float, whose: str) -> None:
    code, x = Code(4), draw(96, 1)
    y = x + np.float32(0.01)
    (x if whose == "source" else y)[40] = bad
    distances = estimates(code, 0.1, 96)
    (sent, of_source), (own, of_own) = code.encode(x, distances), code.encode(y, distances)
    assert (of_source, of_own) == ((1, 0) if whose == "source" else (0, 1))
    change, new, missed = code.change(y, own, [sent], distances)
    assert np.isnan(change[32:64]).all() and np.isfinite(np.delete(change, slice(32, 64))).all()
    assert missed == 0 and new[1] == distances[1]


@pytest.mark.parametrize("bits", [4, 8])
def test_zeros_tiny_and_huge_values(bits: int) -> None:
    code, most = Code(bits), 8.5e37  # just below 2^126
    for values in (np.zeros(40), np.full(40, 1e-42), np.linspace(-most, most, 40), np.linspace(-1e-38, 1e37, 40)):
        x = values.astype(np.float32)
        for distance in (0, 1e-45, 1e-3, 3e38):
            distances = estimates(code, distance, 40)
            sent = code.encode(x, distances)[0]
            change, new, missed = code.change(x, sent, [sent], distances)
            assert not change.any() and missed == 0 and np.isfinite(new).all()


def test_without_estimates_values_are_nearly_exact() -> None:
    """The step is 2^-20 of the largest value's power of two if the estimate is 0."""
    code, x = Code(4), draw(32, 3)
    y = np.zeros(32, np.float32)
    distances = estimates(code, 0, 32)
    wide = estimates(code, 10, 32)
    change, _, missed = code.change(y, code.encode(y, wide)[0], [code.encode(x, distances)[0]], wide, 1.0)
    assert missed == 1 and not change.any()
    near = code.rounded(x, distances).astype(np.float32)
    change, _, missed = code.change(near, code.encode(near, distances)[0], [code.encode(x, distances)[0]], distances)
    assert missed == 0 and not change.any()


def test_a_worker_without_sources_is_unchanged() -> None:
    code, x = Code(8), draw(100, 1)
    distances = estimates(code, 0.5, 100)
    change, new, missed = code.change(x, code.encode(x, distances)[0], [], distances)
    assert not change.any() and missed == 0 and np.array_equal(new, distances)


def test_bytes_that_no_encoding_has_written() -> None:
    code, x = Code(8), draw(64, 1)
    distances = estimates(code, 0.5, 64)
    own = code.encode(x, distances)[0]
    wrong = own.copy()
    wrong[36:38] = 0xFF  # a NaN as the step of the second block, with a checksum
    with pytest.raises(UsageError, match="encoded otherwise"):
        code.change(x, own, [own, wrong], distances)
    with pytest.raises(UsageError, match="encoded otherwise"):
        code.change(x, wrong, [own], distances)


def test_sizes_and_settings() -> None:
    assert kernels.ModuloCodec(8, 128).bytes(129) == 2 * 132 and kernels.ModuloCodec(4, 128).bytes(1) == 68
    assert kernels.ModuloCodec(4, 32).bytes(0) == kernels.ModuloCodec(4, 32).blocks(0) == 0
    for bits, block in ((5, 128), (0, 128), (8, 33), (4, 16), (8, 1 << 15), (4, 0)):
        with pytest.raises(UsageError):
            kernels.ModuloCodec(bits, block)
