"""From torch tensors to the addresses that the core works on, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sordino._core import Result, kernels
from sordino.errors import NotBuilt, UsageError

# Codes of csrc/base/dtype.h.
DTYPE_CODES: dict[torch.dtype, int] = {
    torch.bool: 0,
    torch.uint8: 1,
    torch.int8: 2,
    torch.uint16: 3,
    torch.int16: 4,
    torch.uint32: 5,
    torch.int32: 6,
    torch.uint64: 7,
    torch.int64: 8,
    torch.float16: 9,
    torch.bfloat16: 10,
    torch.float32: 11,
    torch.float64: 12,
}
DTYPES: dict[int, torch.dtype] = {code: dtype for dtype, code in DTYPE_CODES.items()}

# (input address, output address or 0, dtype code, shape)
Described = tuple[int, int, int, tuple[int, ...]]


def dtype_code(tensor: torch.Tensor) -> int:
    """The core's code of a tensor's dtype. UsageError for dtypes it has no kernels for."""
    try:
        return DTYPE_CODES[tensor.dtype]
    except KeyError:
        raise UsageError(f"Tensor type {tensor.type()} ({tensor.dtype}) is not supported.") from None


def dense_strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """The strides that a gradient must have for all ranks to mean the same element at the same place."""
    if parameter.is_contiguous():
        return parameter.stride()
    return torch.empty_like(parameter, memory_format=torch.preserve_format).stride()


def label(name: str, tensor: torch.Tensor) -> str:
    """What layouts call a tensor. Memory order counts: ranks reduce and average place by place."""
    return name if tensor.is_contiguous() else f"{name} with strides {dense_strides(tensor)}"


def check(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, detached, once it is known to be one that the core can move."""
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"expected a torch.Tensor, not {type(tensor).__name__}")
    if tensor.is_sparse:
        raise UsageError("a sparse tensor needs sparse_allreduce_async, or to_dense()")
    if tensor.device.type != "cpu":
        raise NotBuilt(f"tensors on {tensor.device} are not supported by this build of Sordino; move them to the CPU")
    dtype_code(tensor)
    return tensor.detach()


def describe(source: torch.Tensor, target: torch.Tensor | None = None) -> Described:
    """What the core needs to know of a contiguous tensor and of the one that takes its result."""
    return (source.data_ptr(), 0 if target is None else target.data_ptr(), dtype_code(source), tuple(source.shape))


def from_result(result: Result, dtype: torch.dtype) -> torch.Tensor:
    """A tensor over memory that the core allocated; no copy."""
    shape: Sequence[int] = result.shape
    view = memoryview(result)  # type: ignore[arg-type]
    if view.nbytes == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(view, dtype=dtype).view(tuple(shape))


def squared_distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """|one - other|_2 squared, summed in float64, of two floating-point tensors of one shape and dtype on the CPU."""
    one, other = check(one).contiguous(), check(other).contiguous()
    return kernels.squared_distance(dtype_code(one), one.data_ptr(), other.data_ptr(), one.numel())
