"""Functions that write results of operations into the caller's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sordino._core import Handle
from sordino.errors import UsageError
from sordino.runtime.tensors import from_result


@dataclass(frozen=True)
class Rows:
    """The rows that a caller expects from each rank of a group.

    Attributes:
        label: the operation, for errors.
        expected: number of rows from each rank.
        unit: name of a row, for errors.
    """

    label: str
    expected: Sequence[int]
    unit: str = "elements"

    @property
    def are_equal(self) -> bool:
        """Whether all ranks are expected to send the same number of rows."""
        return len(set(self.expected)) == 1

    def compare(self, received: Sequence[int]) -> None:
        """Raise UsageError if a rank has sent another number of rows."""
        for rank, (found, wanted) in enumerate(zip(received, self.expected)):
            if found != wanted:
                raise UsageError(
                    f"{self.label}: rank {rank} has sent {found} {self.unit}; the output has {wanted} for it"
                )


def fill(place: torch.Tensor, result: torch.Tensor) -> None:
    """Copy a result into a tensor. Raises UsageError if their numbers of elements differ."""
    if result.numel() != place.numel():
        raise UsageError(f"the ranks' tensors have {result.numel()} elements together; the output has {place.numel()}")
    place.copy_(result.view_as(place))


def fill_from(handle: Handle, place: torch.Tensor, rows: Rows | None) -> None:
    """Copy the result that the core has allocated, if any, into a tensor.

    Raises:
        UsageError: a rank has sent another number of rows than expected.
    """
    if rows is not None:
        rows.compare(handle.rows)
    if handle.results:
        fill(place, from_result(handle.results[0], place.dtype, place.device))


def spread(whole: torch.Tensor, outputs: Sequence[torch.Tensor]) -> None:
    """Copy consecutive parts of a tensor into others."""
    begin = 0
    for output in outputs:
        output.detach().copy_(whole[begin : begin + output.numel()].view_as(output))
        begin += output.numel()
