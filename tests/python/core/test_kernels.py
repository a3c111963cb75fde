"""The kernels through Python, against NumPy and against each other at every instruction set level."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from checks.levels import levels
from checks.reference import DTYPES, FLOATS, FOLDS, INTEGERS, assert_reduced, values
from hypothesis import given
from hypothesis import strategies as st

import sordino.torch as hvd
from sordino._core import kernels
from sordino.errors import UsageError
from sordino.runtime.dtypes import DTYPE_CODES

KERNEL_FOLDS = {name: op for name, op in FOLDS.items() if name != "Average"}


pytestmark = pytest.mark.usefixtures("level_as_before")


def reduce(
    op: int, tensors: list[torch.Tensor], copies: int = 1, pre: float = 1, post: float = 1
) -> list[torch.Tensor]:
    outputs = [torch.empty_like(tensors[0]) for _ in range(copies)]
    addresses = [[tensor.data_ptr() for tensor in group] for group in (tensors, outputs)]
    kernels.reduce(op, DTYPE_CODES[tensors[0].dtype], *addresses, tensors[0].numel(), pre, post)
    return outputs


def test_the_reference_allows_infinities_only_where_values_overflow() -> None:
    """In float16 a product of 90,000 may be infinite, as the largest number is 65,504; a product of 4 may not."""
    inputs = [torch.tensor([300.0, 2.0], dtype=torch.float16)] * 2
    assert_reduced(torch.tensor([np.inf, 4.0], dtype=torch.float16), hvd.Product, inputs)
    for wrong in ([np.inf, np.inf], [300.0, 4.0], [np.inf, 5.0]):
        with pytest.raises(AssertionError, match=r"1 of 2 torch\.float16 elements are wrong"):
            assert_reduced(torch.tensor(wrong, dtype=torch.float16), hvd.Product, inputs)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fold", KERNEL_FOLDS)
def test_reductions_at_every_level(fold: str, dtype: torch.dtype) -> None:
    op = KERNEL_FOLDS[fold]
    for count, sources in ((0, 2), (1, 1), (7, 3), (64, 2), (1003, 5), (40_000, 4)):
        tensors = [values(i, count, dtype, seed=op) for i in range(sources)]
        for pre, post in ((1.0, 1.0), (0.5, 3.0), (1.0, 1 / sources)):
            results = set()
            for _ in levels():
                outputs = reduce(op, tensors, copies=2, pre=pre, post=post)
                assert_reduced(outputs[0], op, tensors, pre, post)
                results |= {raw(output) for output in outputs}
            assert len(results) == 1, f"levels differ in {fold} of {count} {dtype}"


@given(
    st.sampled_from(DTYPES),
    st.sampled_from(sorted(KERNEL_FOLDS)),
    st.integers(1, 6),
    st.integers(0, 300),
    st.integers(0, 7),
    st.sampled_from([1.0, 0.25, -2.0]),
    st.integers(0, 1000),
)
def test_any_address_and_in_place(dtype, fold, sources, count, shift, factor, seed) -> None:
    op = KERNEL_FOLDS[fold]
    inputs = [values(i, count, dtype, seed=seed) for i in range(sources)]
    memory = [torch.zeros(count + 9, dtype=torch.float32).to(dtype) for _ in inputs]
    places = [block[shift : shift + count] for block in memory]
    for place, tensor in zip(places, inputs):
        place.copy_(tensor)
    addresses = [place.data_ptr() for place in places]
    kernels.reduce(op, DTYPE_CODES[dtype], addresses, addresses, count, factor, 1.0)
    for block, place in zip(memory, places):
        assert_reduced(place, op, inputs, factor)
        assert not block[:shift].to(torch.float64).any() and not block[shift + count :].to(torch.float64).any()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_axpby_and_scale(dtype: torch.dtype) -> None:
    code, slack = DTYPE_CODES[dtype], torch.finfo(dtype).eps * 8
    for count in (0, 1, 33, 5000):
        x, y = values(0, count, dtype), values(1, count, dtype)
        for _ in levels():
            result = y.clone()
            kernels.axpby(code, x.data_ptr(), result.data_ptr(), count, 0.75, -2.0)
            torch.testing.assert_close(result.double(), 0.75 * x.double() - 2 * y.double(), atol=slack * 4, rtol=slack)
            scaled = x.clone()
            kernels.scale(code, scaled.data_ptr(), count, 0.3)
            torch.testing.assert_close(scaled.double(), 0.3 * x.double(), atol=slack, rtol=slack)
    with pytest.raises(UsageError):
        kernels.axpby(DTYPE_CODES[torch.int32], 0, 0, 0, 1.0, 1.0)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_scaled_integers_saturate(dtype: torch.dtype) -> None:
    limits = np.iinfo(np.dtype(str(dtype).removeprefix("torch.")))
    for factor, wanted in ((1e30, limits.max), (-1e30, limits.min), (float("nan"), 0), (float("inf"), limits.max)):
        tensor = torch.tensor([1], dtype=dtype)
        kernels.scale(DTYPE_CODES[dtype], tensor.data_ptr(), 1, factor)
        assert tensor.item() == wanted, factor
    if limits.min < 0:
        tensor = torch.tensor([-3, 3], dtype=dtype)
        kernels.scale(DTYPE_CODES[dtype], tensor.data_ptr(), 2, 0.5)
        assert tensor.tolist() == [-1, 1]


@given(st.lists(st.integers(0, 50), max_size=8))
def test_flatten_and_back(counts: list[int]) -> None:
    tensors = [values(i, count, torch.int16) for i, count in enumerate(counts)]
    flat = torch.empty(sum(counts), dtype=torch.int16)
    kernels.flatten([(t.data_ptr(), t.numel() * 2) for t in tensors], flat.data_ptr())
    assert torch.equal(flat, torch.cat(tensors) if tensors else flat)
    back = [torch.empty_like(tensor) for tensor in tensors]
    kernels.unflatten(flat.data_ptr(), [(t.data_ptr(), t.numel() * 2) for t in back])
    assert all(torch.equal(a, b) for a, b in zip(tensors, back))


def test_what_is_refused() -> None:
    x = torch.ones(1)
    for op in (hvd.Average, hvd.Adasum):
        with pytest.raises(UsageError):
            kernels.reduce(op, DTYPE_CODES[torch.float32], [x.data_ptr()], [x.data_ptr()], 1)
    with pytest.raises(UsageError):
        kernels.reduce(hvd.Sum, DTYPE_CODES[torch.float32], [], [x.data_ptr()], 1)
    with pytest.raises(UsageError, match="sse9"):
        kernels.set_level("sse9")
