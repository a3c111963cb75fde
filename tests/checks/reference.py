"""Inputs of every rank and the results of reductions of them: in float64, or exact for integers."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import torch

import sordino.torch as hvd

INTEGERS = (
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int16,
    torch.uint32,
    torch.int32,
    torch.uint64,
    torch.int64,
)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DTYPES = (torch.bool, *INTEGERS, *FLOATS)
FOLDS = {"Average": hvd.Average, "Sum": hvd.Sum, "Min": hvd.Min, "Max": hvd.Max, "Product": hvd.Product}
LENGTHS = (0, 1, 3, 1000, 70001)


def numpy_type(dtype: torch.dtype) -> np.dtype:
    """Return the NumPy type that holds values of `dtype` exactly."""
    if dtype == torch.bfloat16:
        return np.dtype(np.float32)
    return torch.empty(0, dtype=dtype).numpy().dtype


def values(
    rank: int, shape: Sequence[int] | int, dtype: torch.dtype, seed: int = 0, wide: bool = False
) -> torch.Tensor:
    """Return the input of `rank`, which any rank can compute. Integers are small or, if `wide`, of the whole range."""
    rng = np.random.default_rng([seed, rank, 77])
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    if dtype == torch.bool:
        return torch.from_numpy(np.asarray(rng.random(shape) < 0.7))
    if dtype in INTEGERS:
        numpy_dtype = numpy_type(dtype)
        limits = np.iinfo(numpy_dtype)
        low, high = (limits.min, limits.max) if wide else (max(limits.min, -20), 20)
        return torch.from_numpy(np.asarray(rng.integers(low, high, shape, dtype=numpy_dtype, endpoint=True)))
    return torch.from_numpy(np.asarray(rng.standard_normal(shape))).to(dtype)


def numbers(tensor: torch.Tensor) -> np.ndarray:
    """Return the tensor's exact values: float64 for floats, the same type for integers and bool."""
    tensor = tensor.detach()
    return tensor.double().numpy() if tensor.is_floating_point() else tensor.numpy()


def _scale(array: np.ndarray, factor: float) -> np.ndarray:
    """Return scaled integers: computed in double, truncated toward zero, saturated. bool is not scaled."""
    if factor == 1 or array.dtype == bool:
        return array
    limits = np.iinfo(array.dtype)
    scaled = np.trunc(array.astype(np.float64) * factor)
    return np.clip(scaled, float(limits.min), float(limits.max)).astype(array.dtype)


def _fold_integers(op: int, arrays: list[np.ndarray]) -> np.ndarray:
    if arrays[0].dtype == bool:
        fold = np.logical_and if op in (hvd.Min, hvd.Product) else np.logical_or
    else:
        fold = {hvd.Min: np.minimum, hvd.Max: np.maximum, hvd.Product: np.multiply}.get(op, np.add)
    result = arrays[0]
    for array in arrays[1:]:
        with np.errstate(over="ignore"):
            result = fold(result, array)
    return result


def expected(
    op: int, tensors: Sequence[torch.Tensor], pre: float = 1.0, post: float = 1.0, size: int | None = None
) -> tuple[np.ndarray, np.ndarray | float, np.ndarray | bool]:
    """Return the reduction of the tensors (one per rank), the permitted error, and where the result may overflow.

    `size` is the divisor of Average, if it is not the number of tensors.
    """
    count = (size or len(tensors)) if op == hvd.Average else 1
    arrays = [numbers(tensor) for tensor in tensors]
    if not tensors[0].is_floating_point():
        factor = post / count
        if abs(Fraction(factor) * count) < abs(Fraction(post)):  # 49 times 1/49 must not be below 1
            factor = float(np.nextafter(factor, np.copysign(np.inf, factor)))
        return _scale(_fold_integers(op, [_scale(array, pre) for array in arrays]), factor), 0.0, False
    post /= count
    scaled = np.stack(arrays) * pre
    if op == hvd.Min:
        result, weight = scaled.min(0), np.abs(scaled).max(0)
    elif op == hvd.Max:
        result, weight = scaled.max(0), np.abs(scaled).max(0)
    elif op == hvd.Product:
        result, weight = scaled.prod(0), np.abs(scaled).prod(0)
    else:
        result, weight = scaled.sum(0), np.abs(scaled).sum(0)
    info = torch.finfo(tensors[0].dtype)
    # Each rank's term is rounded, each partial result may be rounded, and subnormals have few digits.
    slack = (len(tensors) + 3) * (info.eps * weight + info.smallest_normal * info.eps * 4)
    return result * post, slack * max(abs(post), 1e-3), weight * max(abs(post), 1) > info.max


def assert_reduced(
    result: torch.Tensor,
    op: int,
    tensors: Sequence[torch.Tensor],
    pre: float = 1.0,
    post: float = 1.0,
    size: int | None = None,
) -> None:
    assert result.dtype == tensors[0].dtype, f"{result.dtype} came of {tensors[0].dtype}"
    assert result.shape == tensors[0].shape, f"{tuple(result.shape)} came of {tuple(tensors[0].shape)}"
    wanted, slack, may_overflow = expected(op, tensors, pre, post, size)
    got = numbers(result)
    if result.is_floating_point():
        with np.errstate(invalid="ignore"):
            wrong = ~(np.abs(got - wanted) <= slack) & ~(may_overflow & ~np.isfinite(got))
    else:
        wrong = got != wanted
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {got.size} {result.dtype} elements are wrong; the first: "
        f"{got[wrong][0]} instead of {wanted[wrong][0]}, from {[numbers(t)[wrong][0] for t in tensors]}"
    )


def assert_equal(result: torch.Tensor, wanted: torch.Tensor) -> None:
    """Assert that tensors are equal bit for bit, in dtype and shape too (also for dtypes that torch.equal cannot
    compare)."""
    assert result.dtype == wanted.dtype, f"{result.dtype} instead of {wanted.dtype}"
    assert result.shape == wanted.shape, f"{tuple(result.shape)} instead of {tuple(wanted.shape)}"
    same = result.numel() == 0 or np.array_equal(
        result.detach().contiguous().reshape(-1).view(torch.uint8).numpy(),
        wanted.detach().contiguous().reshape(-1).view(torch.uint8).numpy(),
    )
    assert same, f"{result} instead of {wanted}"
