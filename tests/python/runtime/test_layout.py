"""Layouts: the position of each tensor, and the hash that ranks compare."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sordino._core import Layout
from sordino.errors import UsageError
from sordino.runtime.exchange.flat_buffer import segment_numbers

SIZES = [1, 1, 1, 2, 2, 4, 4, 8, 8, 2, 2, 4, 8]  # by dtype code
ALIGNMENT = 64
FLOAT32, FLOAT64 = 11, 12

shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)
entries = st.lists(st.tuples(st.integers(0, 12), shapes), max_size=12).map(
    lambda drawn: [(f"t{i}", dtype, shape) for i, (dtype, shape) in enumerate(drawn)]
)


def size_of(tensor: tuple[str, int, tuple[int, ...]]) -> int:
    return SIZES[tensor[1]] * math.prod(tensor[2])


@given(entries, st.integers(1, 2000))
def test_tensors_lie_in_order_in_segments(tensors: list, segment_bytes: int) -> None:
    layout = Layout(tensors, segment_bytes)
    assert len(layout.offsets) == len(tensors)
    assert [run.first for run in layout.segments] == [0, *(run.last for run in layout.segments)][: len(layout.segments)]
    assert not tensors or layout.segments[-1].last == len(tensors)
    end = 0
    for run in layout.segments:
        assert run.offset % ALIGNMENT == 0 and run.offset >= end
        members = tensors[run.first : run.last]
        assert {dtype for _, dtype, _ in members} == {run.dtype}
        at = run.offset
        for offset, tensor in zip(layout.offsets[run.first : run.last], members):
            assert offset == at, "tensors of a segment lie back to back"
            at += size_of(tensor)
        assert run.bytes == at - run.offset
        assert run.bytes <= segment_bytes or len(members) == 1 or sum(size_of(t) > 0 for t in members) == 1
        end = at
    assert layout.bytes % ALIGNMENT == 0 and end <= layout.bytes < end + ALIGNMENT


@given(entries, st.integers(1, 2000))
def test_segments_are_not_cut_without_need(tensors: list, segment_bytes: int) -> None:
    runs = Layout(tensors, segment_bytes).segments
    for left, right in itertools.pairwise(runs):
        assert left.dtype != right.dtype or left.bytes + size_of(tensors[right.first]) > segment_bytes


@given(entries, st.data())
def test_the_hash_tells_any_difference(tensors: list, data: st.DataObject) -> None:
    original = Layout(tensors, 1000)
    assert Layout(list(tensors), 77).hash == original.hash  # segmentation does not count
    if not tensors:
        return
    index = data.draw(st.integers(0, len(tensors) - 1))
    name, dtype, shape = tensors[index]
    for other in ((name + "x", dtype, shape), (name, (dtype + 1) % 13, shape), (name, dtype, (*shape, 1))):
        changed = [*tensors[:index], other, *tensors[index + 1 :]]
        assert Layout(changed, 1000).hash != original.hash
        different = [a == b for a, b in zip(Layout(changed, 1000).describe(), original.describe())]
        assert different.count(False) == 1 and not different[index]
    assert Layout(tensors[:-1], 1000).hash != original.hash


def test_names_run_together_do_not_collide() -> None:
    def one(*names: str) -> int:
        return Layout([(name, FLOAT32, (1,)) for name in names], 100).hash

    assert len({one("ab", "c"), one("a", "bc"), one("abc"), one("c", "ab")}) == 4


def test_duplicates_are_refused() -> None:
    with pytest.raises(UsageError, match="'w'"):
        Layout([("w", FLOAT32, (1,)), ("v", FLOAT32, (1,)), ("w", FLOAT64, (2,))], 100)


def test_unknown_dtypes_are_refused() -> None:
    with pytest.raises(UsageError):
        Layout([("w", 99, (1,))], 100)


def test_it_says_what_it_is_made_of() -> None:
    layout = Layout([("layer.weight", FLOAT32, (3, 4)), ("n", 8, ())], 100)
    assert layout.describe() == ["layer.weight float32 [3, 4]", "n int64 []"]


def test_parts_of_an_arena_lie_where_they_say() -> None:
    layout = Layout.of_parts([(64, 8, FLOAT32, 0), (0, 16, FLOAT64, 0), (128, 64, FLOAT32, 3)], bytes=192)
    assert layout.bytes == 192
    found = [(run.offset, run.bytes, run.dtype, run.group) for run in layout.segments]
    assert found == [(64, 8, FLOAT32, 0), (0, 16, FLOAT64, 0), (128, 64, FLOAT32, 3)]
    for parts in ([(192, 4, FLOAT32, 0)], [(0, 193, FLOAT32, 0)], [(0, 4, FLOAT32, 1), (4, 4, FLOAT32, 0)]):
        with pytest.raises(UsageError, match="parts lie within the arena's 192 bytes, in rising groups"):
            Layout.of_parts(parts, bytes=192)


def test_tensors_fill_segments_to_the_last_byte() -> None:
    names = list("abcdef")
    assert segment_numbers(names, [4, 4, 4, 4, 8, 0], 8) == [0, 0, 1, 1, 2, 2]
    assert segment_numbers(names, [4, 5, 9, 1, 1, 7], 8) == [0, 1, 2, 3, 3, 4]  # a larger tensor goes alone
    assert segment_numbers(names, [4, 4, 4, 4, 8, 0], "model") == [0] * 6


def test_the_hash_tells_which_tensors_are_exchanged_as_one() -> None:
    tensors = [(name, FLOAT32, (4,)) for name in "abc"]
    hashes = {Layout(tensors, groups=list(groups)).hash for groups in ((0, 0, 0), (0, 0, 1), (0, 1, 1), (0, 1, 2))}
    assert len(hashes) == 4
