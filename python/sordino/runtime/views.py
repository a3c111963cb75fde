"""Views of tensors with a dtype that the core does not support, as tensors with one that it supports."""

from __future__ import annotations

import torch

from sordino.errors import UsageError
from sordino.runtime.dtypes import DTYPE_CODES


def movable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the same memory that the core can send and receive; most often the tensor itself.

    Complex numbers become pairs of real numbers, in one more dimension, so a sum of pairs is a sum of the numbers. A
    dtype of one byte, such as float8, becomes uint8, which can be moved, but not added.

    Args:
        tensor: tensor of any dtype and strides, detached.

    Raises:
        UsageError: the tensor is a conjugated view, whose memory has other values than it shows.
    """
    dtype = tensor.dtype
    if dtype in DTYPE_CODES:
        return tensor
    if tensor.is_complex():
        if tensor.is_conj():
            raise UsageError("a conjugated view of a complex tensor cannot be used. Pass tensor.resolve_conj()")
        return torch.view_as_real(tensor)
    if dtype.itemsize == 1:
        return tensor.view(torch.uint8)
    return tensor
