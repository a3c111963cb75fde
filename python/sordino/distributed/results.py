"""Write results of operations into the caller's tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sordino._core import Handle
from sordino.errors import UsageError
from sordino.runtime.tensors import from_result


def fill(place: torch.Tensor, result: torch.Tensor) -> None:
    """Copy a result into a tensor. Raises UsageError if their numbers of elements differ."""
    if result.numel() != place.numel():
        raise UsageError(f"the ranks' tensors have {result.numel()} elements together; the output has {place.numel()}")
    place.copy_(result.view_as(place))


def fill_from(handle: Handle, place: torch.Tensor) -> None:
    """Copy the result that the core has allocated, if any, into a tensor."""
    if handle.results:
        fill(place, from_result(handle.results[0], place.dtype, place.device))


def spread(whole: torch.Tensor, outputs: Sequence[torch.Tensor]) -> None:
    """Copy consecutive parts of a tensor into others."""
    begin = 0
    for output in outputs:
        output.detach().copy_(whole[begin : begin + output.numel()].view_as(output))
        begin += output.numel()
