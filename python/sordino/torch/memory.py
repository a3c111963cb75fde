"""Tensors in memory that the ranks of a node share. They are averaged fastest."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sordino._core import Layout
from sordino.errors import UsageError
from sordino.runtime.context import Context, current
from sordino.runtime.devices import HOST
from sordino.runtime.dtypes import DTYPE_CODES
from sordino.runtime.exchange.flat_buffer import FlatBuffer
from sordino.runtime.gradients.places import WHOLE
from sordino.runtime.tensors import check


def shared_empty(
    *shape: int | Sequence[int], dtype: torch.dtype | None = None, device: torch.device | str = HOST
) -> torch.Tensor:
    """Return a tensor of zeros in shared memory, on which in-place all-reduces of one node run at memory speed.

    Not collective: other ranks need not call it, but an all-reduce is fastest when all ranks' tensors are shared.

    Args:
        shape: shape, as in `torch.empty`.
        dtype: any supported dtype; None: torch's default.
        device: the CPU, or a GPU, whose memory processes share by CUDA IPC.

    Raises:
        TransportError: the machine has no shared memory left.
    """
    extents = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else tuple(shape)  # type: ignore[arg-type]
    return _allocate(current(), torch.Size(extents), dtype or torch.get_default_dtype(), torch.device(device))  # type: ignore[arg-type]


def _allocate(context: Context, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if dtype not in DTYPE_CODES:
        raise UsageError(f"{dtype} tensors cannot be reduced, so they cannot be shared")
    count = shape.numel()
    if count == 0:
        return torch.empty(shape, dtype=dtype, device=device)
    layout = Layout([("shared", DTYPE_CODES[dtype], tuple(shape))], WHOLE)
    return FlatBuffer(context, layout, device).flat(dtype, 0, count).view(shape)


def share(tensor: torch.Tensor) -> torch.Tensor:
    """Move a tensor's values into shared memory.

    `tensor` itself is in shared memory afterwards. Existing views of it keep the old memory.

    Args:
        tensor: tensor of any shape, on the CPU or a GPU. It becomes contiguous.

    Returns:
        `tensor` itself.
    """
    dense = check(tensor)
    if is_shared(tensor):
        return tensor
    copy = _allocate(current(), dense.shape, dense.dtype, dense.device)
    copy.copy_(dense)
    tensor.data = copy
    return tensor


def is_shared(tensor: torch.Tensor) -> bool:
    """Return whether a contiguous tensor is in memory that the ranks of this node share."""
    return current().world.in_shared_memory(tensor.data_ptr(), tensor.numel() * tensor.element_size())
