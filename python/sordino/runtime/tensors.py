"""Conversion of torch tensors to addresses for the core, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from sordino._core import Result, kernels
from sordino.errors import UsageError
from sordino.runtime.devices import HOST, core_device, gpu_tensor
from sordino.runtime.dtypes import DTYPE_CODES

# (input address, output address or 0, dtype code, shape)
Described = tuple[int, int, int, tuple[int, ...]]


def dtype_code(tensor: torch.Tensor, name: str = "") -> int:
    """Return the core's code of a tensor's dtype. Raises UsageError, with `name`, for a dtype without kernels."""
    try:
        return DTYPE_CODES[tensor.dtype]
    except KeyError:
        where = f"{name}: " if name else ""
        fix = " Use torch.view_as_real(tensor)." if tensor.is_complex() else ""
        raise UsageError(f"{where}Tensor type {tensor.type()} ({tensor.dtype}) is not supported.{fix}") from None


def dense_strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the strides that a gradient must have, so that all ranks have the same element at the same offset."""
    if parameter.is_contiguous():
        return parameter.stride()
    return torch.empty_like(parameter, memory_format=torch.preserve_format).stride()


@torch.no_grad()
def match_memory_formats(optimizer: torch.optim.Optimizer) -> None:
    """Give tensors in an optimizer's state the memory format of their parameter, if they have its shape.

    A state that was sent or loaded is row-major. torch's fused optimizers, and kernels of the core, take the elements
    of a parameter and of its state in memory order, whatever their strides.
    """
    for parameter, state in optimizer.state.items():
        if type(parameter) not in (torch.Tensor, torch.nn.Parameter) or not isinstance(state, dict):
            continue
        for name, value in state.items():
            if type(value) is not torch.Tensor or value.layout != torch.strided or value.shape != parameter.shape:
                continue
            if value.stride() != dense_strides(parameter):
                state[name] = torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def label(name: str, tensor: torch.Tensor) -> str:
    """Return a tensor's name in layouts. It includes the memory order, because ranks reduce offset by offset."""
    return name if tensor.is_contiguous() else f"{name} with strides {dense_strides(tensor)}"


def as_tensor(array: Any) -> torch.Tensor:
    """Return a tensor that shares memory with an array that supports DLPack; a tensor is returned as it is.

    Such arrays are CuPy's, JAX's and NumPy's. Work on the array's stream is ordered before torch's current stream, as
    DLPack specifies. The array's stream is not ordered after the results of an operation in place: DLPack has no such
    call. Results are tensors of torch, whose `__dlpack__(stream=...)` orders the stream of the library that takes them.

    Raises:
        UsageError: `array` is neither a tensor nor such an array.
    """
    if isinstance(array, torch.Tensor):
        return array
    if not (hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__")):
        raise UsageError(f"expected a torch.Tensor or an array with __dlpack__, not {type(array).__name__}")
    try:
        return from_dlpack(array)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise UsageError(f"torch cannot import this {type(array).__name__} by DLPack: {error}") from error


def stored_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements that a tensor has in memory: all of a dense tensor, the entries of a sparse COO tensor."""
    return tensor._values() if tensor.is_sparse else tensor


def address_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's first element; 0 if it has no elements.

    Raises:
        UsageError: the tensor has elements but no memory, such as a DTensor, another wrapper subclass, a FakeTensor, or
            a tensor within `torch.func` transforms.
    """
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # raised by torch if there is no storage
        address = 0
    if address == 0 and tensor.numel():
        kind = type(tensor).__name__
        what = "a tensor without storage" if kind in ("Tensor", "Parameter") else f"a {kind}"
        local = hasattr(tensor, "to_local")
        fix = "Pass its local shard, tensor.to_local()" if local else "Pass the ordinary tensor that it represents"
        raise UsageError(f"{what} of shape {tuple(tensor.shape)} has no memory to send. {fix}")
    return address


def check(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, detached, after a check that the core can communicate it.

    Raises:
        UsageError: its layout or dtype is not supported, or it has no memory.
        NotBuilt: its device is not supported.
    """
    tensor = as_tensor(tensor)
    if tensor.is_sparse:
        raise UsageError("a sparse tensor needs sparse_allreduce_async, or to_dense()")
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else f"{tensor.layout}"
        raise UsageError(f"a {kind} tensor cannot be sent. Pass a tensor of its values with layout torch.strided")
    core_device(tensor.device)
    dtype_code(tensor)
    address_of(tensor)
    return tensor.detach()


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Return a row-major tensor with the same values; the tensor itself if it is row-major already.

    A tensor with the negative bit (the imaginary part of a conjugate) is negated in memory, so it is copied.
    """
    return (tensor.resolve_neg() if tensor.is_neg() else tensor).contiguous()


def describe(source: torch.Tensor, target: torch.Tensor | None = None) -> Described:
    """Return the addresses of a contiguous tensor and of the tensor for its result, with dtype code and shape.

    Raises:
        UsageError: a tensor has no memory, or has its values negated in memory.
    """
    if source.is_neg() or (target is not None and target.is_neg()):
        raise UsageError(
            "a tensor with the negative bit cannot be sent: its memory is negated. Pass tensor.resolve_neg()"
        )
    output = 0 if target is None else address_of(target)
    return (address_of(source), output, dtype_code(source), tuple(source.shape))


def from_result(result: Result, dtype: torch.dtype, device: torch.device = HOST) -> torch.Tensor:
    """Return a tensor from memory that the core allocated: a view on the host, else a copy on `device`."""
    shape: Sequence[int] = result.shape
    if result.bytes == 0:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    if result.on_device and device.type == "cuda":
        core = core_device(device)
        assert core is not None
        # Copied to torch's own memory, because torch's allocator knows which streams still use it.
        copy = gpu_tensor(result, result.address, result.bytes, device).clone().view(dtype).view(tuple(shape))
        result.copied(core)
        return copy
    view = memoryview(result)  # type: ignore[arg-type]
    return torch.frombuffer(view, dtype=dtype).view(tuple(shape)).to(device)


def squared_distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return |one - other|_2 squared, summed in float64.

    Both must be floating-point tensors with the same shape, dtype and device.
    """
    one, other = contiguous(check(one)), contiguous(check(other))
    device = core_device(one.device)
    if device is None:
        return kernels.squared_distance(dtype_code(one), one.data_ptr(), other.data_ptr(), one.numel())
    found = torch.zeros(1, dtype=torch.float64, device=one.device)
    device.squared_distances(dtype_code(one), [(one.data_ptr(), other.data_ptr())], [one.numel()], found.data_ptr())
    return float(found)
