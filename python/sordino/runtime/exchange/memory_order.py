"""Order of the elements of parameters in flat tensors: as they lie in memory, or row-major for checkpoints.

A checkpoint does not depend on the memory format of the model: training with `torch.channels_last` can continue without
it, and vice versa.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from sordino.runtime.exchange.flat_buffer import ParameterBuffer
from sordino.runtime.tensors import dense_strides


class Strided(NamedTuple):
    """Place of a parameter in flat tensors, if its elements do not lie in row-major order.

    Attributes:
        number: number of the flat tensor.
        range: range of the parameter's elements in it.
        shape: shape of the parameter.
        strides: its strides, without gaps.
    """

    number: int
    range: slice
    shape: torch.Size
    strides: tuple[int, ...]

    @classmethod
    def of(cls, number: int, begin: int, parameter: torch.Tensor) -> Strided:
        """Return the place of a parameter that begins at this element of a flat tensor."""
        return cls(number, slice(begin, begin + parameter.numel()), parameter.shape, dense_strides(parameter))


def strided_in(arena: ParameterBuffer) -> list[Strided]:
    """Return the places in the runs of an arena of all tensors whose elements are not in row-major order."""
    found = []
    for tensor, offset in zip(arena.tensors, arena.layout.offsets):
        if tensor.is_contiguous():
            continue
        address = arena.address + offset
        for number, (_, run) in enumerate(arena.runs):
            begin = (address - run.data_ptr()) // run.element_size()
            if run.dtype == tensor.dtype and 0 <= begin < len(run):
                found.append(Strided.of(number, begin, tensor))
                break
    return found


@torch.no_grad()
def to_row_major(values: Sequence[torch.Tensor], places: Sequence[Strided]) -> list[torch.Tensor]:
    """Return copies of flat tensors, with the elements of each parameter in row-major order."""
    copies = [value.clone() for value in values]
    for number, span, shape, strides in places:
        copies[number][span] = values[number][span].as_strided(shape, strides).reshape(-1)
    return copies


@torch.no_grad()
def to_memory_order(values: Sequence[torch.Tensor], places: Sequence[Strided]) -> list[torch.Tensor]:
    """Return copies of flat tensors from `to_row_major`, with the elements of each parameter as they lie in memory."""
    copies = [value.clone() for value in values]
    for number, span, shape, strides in places:
        copies[number][span].as_strided(shape, strides).copy_(values[number][span].view(shape))
    return copies
