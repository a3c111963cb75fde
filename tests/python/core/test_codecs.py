"""Codecs: against formulas in float64, at every instruction set level, and what they must never do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from checks.levels import levels
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from sordino.codecs import (
    CODECS,
    BFloat16,
    Codec,
    FlatCodec,
    Float16,
    Int4,
    Int8,
    PowerSGD,
    Sign,
    TopK,
    TwoBit,
    codec_of,
    flat_codec_of,
)
from sordino.errors import UsageError

pytestmark = pytest.mark.usefixtures("level_as_before")

COUNTS = (0, 1, 31, 32, 127, 128, 129, 5000)
ALL = (Int8(), Int8(32), Int4(), Int4(1024), TwoBit(), Sign(64), TopK(), TopK(0.1, 128), TopK(0.1, 64, 32), Float16())


def encoded(codec: FlatCodec, values: np.ndarray) -> tuple[torch.Tensor, int]:
    source = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
    coder = codec.coder()
    # Two bytes more than needed, to see that they are not written.
    room = torch.full((coder.bytes(source.numel()) + 2,), 0xA5, dtype=torch.uint8)
    infinite = torch.zeros(1, dtype=torch.int32)
    coder.encode(source, room[:-2], infinite)
    assert room[-2:].tolist() == [0xA5, 0xA5]
    return room[:-2].clone(), int(infinite)


def decoded(codec: FlatCodec, code: torch.Tensor, count: int) -> np.ndarray:
    values = torch.full((count,), 7.0)
    codec.coder().decode(code, values, 1.0, False)
    return values.numpy()


def through(codec: FlatCodec, values: np.ndarray) -> np.ndarray:
    return decoded(codec, encoded(codec, values)[0], len(values))


def reference(codec: FlatCodec, values: np.ndarray) -> np.ndarray:
    """Return one block after encoding and decoding, by the codec's formulas in float64."""
    x = values.astype(np.float64)
    most = np.abs(x).max()
    if isinstance(codec, (Int8, Int4)):
        scale = most / (127 if isinstance(codec, Int8) else 7)
        return np.round(x / scale) * scale if most > 0 else 0 * x
    if isinstance(codec, TwoBit):
        root = np.sqrt(np.mean(x * x))
        return np.copysign(np.where(np.abs(x) > 0.9816 * root, 1.510, 0.4528) * root, x)
    if isinstance(codec, Sign):
        return np.copysign(np.mean(np.abs(x)), x)
    assert isinstance(codec, TopK)
    kept = min(max(1, round(codec.ratio * codec.chunk)), len(x))
    places = np.argsort(-np.abs(x), kind="stable")[:kept]
    result = np.zeros_like(x)
    if codec.bits == 32:
        result[places] = x[places]
        return result
    magnitudes = np.abs(x[places])
    upper = magnitudes > magnitudes.mean()
    high, low = (magnitudes[one].mean() if one.any() else 0.0 for one in (upper, ~upper))
    result[places] = np.copysign(np.where(upper, high, low), x[places])
    return result


@pytest.mark.parametrize("codec", ALL[:-1], ids=repr)
@pytest.mark.parametrize("count", COUNTS)
def test_each_block_follows_its_formula_at_every_level(codec: FlatCodec, count: int) -> None:
    values = np.random.default_rng(count).standard_normal(count).astype(np.float32) * 3
    blocks = [values[i : i + codec.unit] for i in range(0, count, codec.unit)]
    wanted = np.concatenate([reference(codec, block) for block in blocks]) if blocks else values
    results = []
    for _ in levels():
        code, infinite = encoded(codec, values)
        assert infinite == 0
        results.append((code.numpy().tobytes(), decoded(codec, code, count).tobytes()))
        found = np.frombuffer(results[-1][1], np.float32)
        # A value between two codes, up to rounding, may become either. Less than one in a hundred is so near.
        near = np.isclose(found, wanted, rtol=1e-5, atol=1e-6)
        assert near.mean() > 0.99 if count else True
        step = np.abs(values).max(initial=0) / 3
        np.testing.assert_allclose(found, wanted, atol=step)
    assert all(one == results[0] for one in results)


@pytest.mark.parametrize("codec", ALL, ids=repr)
def test_decoding_adds_a_weighted_value_and_counts_it(codec: FlatCodec) -> None:
    values = np.random.default_rng(1).standard_normal(300).astype(np.float32)
    code, _ = encoded(codec, values)
    plain = decoded(codec, code, 300)
    total, given = torch.ones(300), torch.zeros(300)
    codec.coder().decode(code, total, -0.25, True, given)
    np.testing.assert_allclose(total.numpy(), 1 - 0.25 * plain, rtol=1e-6)
    assert (given.numpy() == 1)[plain != 0].all()
    sparse = isinstance(codec, TopK)
    assert given.sum().item() == (np.count_nonzero(plain) if sparse else 300)


@pytest.mark.parametrize("codec", ALL, ids=repr)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_reported_and_stays_so(codec: FlatCodec, bad: float) -> None:
    values = np.ones(3 * max(codec.unit, 32), np.float32)
    place = codec.unit + 5 if codec.unit > 1 else 5
    values[place] = bad
    code, infinite = encoded(codec, values)
    assert infinite == 1
    found = decoded(codec, code, len(values))
    assert not np.isfinite(found[place])
    if codec.unit > 1:
        assert np.isfinite(found[: codec.unit]).all() and np.isfinite(found[2 * codec.unit :]).all()


@pytest.mark.parametrize("codec", ALL, ids=repr)
def test_zeros_tiny_and_huge_values(codec: FlatCodec) -> None:
    assert not through(codec, np.zeros(200, np.float32)).any()
    assert np.isfinite(through(codec, np.full(200, 1e-42, np.float32))).all()
    if not isinstance(codec, Float16):  # its range ends at 65504
        huge = through(codec, np.linspace(-1, 1, 200, dtype=np.float32) * np.finfo(np.float32).max)
        assert np.isfinite(huge).all() and huge[0] < -1e38 and huge[-1] > 1e38


@settings(deadline=None)
@given(arrays(np.float32, st.integers(1, 300), elements=st.floats(-1e6, 1e6, width=32)), st.sampled_from((Int8, Int4)))
def test_no_integer_is_off_by_more_than_half_a_step(values: np.ndarray, kind: type[Int8] | type[Int4]) -> None:
    codec = kind(32)
    found = through(codec, values).astype(np.float64)
    for begin in range(0, len(values), 32):
        block = values[begin : begin + 32].astype(np.float64)
        most = np.abs(block).max()
        half = most / (127 if kind is Int8 else 7) / 2
        assert np.abs(found[begin : begin + 32] - block).max() <= half * (1 + 1e-5) + 1e-30


@settings(deadline=None)
@given(arrays(np.float32, st.integers(1, 200), elements=st.sampled_from([-2.0, -1.0, 0.0, 0.5, 1.0, 2.0])))
def test_of_equal_values_the_first_are_sent(values: np.ndarray) -> None:
    codec = TopK(ratio=0.25, chunk=32, bits=32)
    found = through(codec, values)
    for begin in range(0, len(values), 32):
        block = values[begin : begin + 32]
        np.testing.assert_array_equal(found[begin : begin + 32], reference(codec, block))


def test_sizes() -> None:
    assert Int8().bytes(128) == 132 and Int8().bytes(129) == 264 and Int4().bytes(128) == 68
    assert TwoBit().bytes(128) == 36 and Sign().bytes(128) == 20 and BFloat16().bytes(5) == 10
    assert TopK().bytes(4096) == 8 + 64 * 14 // 8 and TopK().bytes(4097) == 120 + 8 + 2
    assert all(codec.bytes(0) == 0 for codec in ALL)


def test_bytes_that_lead_outside_are_refused() -> None:
    codec = TopK(ratio=0.5, chunk=32, bits=32)
    with pytest.raises(UsageError, match="beyond the end"):
        decoded(codec, torch.full((codec.bytes(5),), 0xFF, dtype=torch.uint8), 5)


@pytest.mark.parametrize(
    ("text", "codec"),
    [
        ("int8", Int8()),
        ("two-bit", TwoBit()),
        ("Int4(block=64)", Int4(64)),
        ("TopK(ratio=0.5, bits=32)", TopK(0.5, bits=32)),
        ("PowerSGD(rank=2)", PowerSGD(2)),
        ("power-sgd", PowerSGD()),
        ("none", None),
        (None, None),
    ],
)
def test_names(text: str | None, codec: Codec | None) -> None:
    assert codec_of(text, "compression") == codec
    if codec is not None:
        assert codec_of(repr(codec), "compression") == codec


@pytest.mark.parametrize(
    "text",
    ["int9", "Int8(", "Int8(128)", "Int8(blocks=64)", "Int8(block=x)", "", "TopK(ratio=2.0)", "Int8(block=65)", 8],
)
def test_what_names_no_codec(text: object) -> None:
    with pytest.raises(UsageError):
        codec_of(text, "compression")  # type: ignore[arg-type]


def test_settings_that_cannot_be() -> None:
    for make in (lambda: Int8(0), lambda: Int4(48), lambda: Sign(1 << 15), lambda: TopK(0.0), lambda: TopK(bits=3)):
        with pytest.raises(UsageError):
            make()
    assert set(map(type, ALL)) | {BFloat16, PowerSGD} == set(CODECS.values())


def test_values_that_powersgd_sends() -> None:
    codec = PowerSGD(2)
    shapes = [(24, 20), (7,), (5, 6, 4), (3, 2), (), (0, 4), (4, 4), (5, 4)]
    factors = [(24, 20), None, (5, 24), None, None, None, None, (5, 4)]
    assert [codec.factors(shape) for shape in shapes] == factors
    assert codec.numbers(shapes) == (2 * (24 + 5 + 5), 2 * (20 + 24 + 4) + 7 + 6 + 1 + 0 + 16)
    assert codec.numbers([]) == (0, 0)
    for rank in (0, -1, 1.5, True, "2"):
        with pytest.raises(UsageError, match="at least 1"):
            PowerSGD(rank)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="Use one of Int8, Int4, TwoBit, Sign, TopK, Float16, BFloat16"):
        flat_codec_of("powersgd", "compression")
    assert flat_codec_of("int8", "compression") == Int8() and flat_codec_of(None, "compression") is None
