"""All-reduces of the same tensors again and again: what the core is told of them is put together once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sordino._core import Request
from sordino.runtime import opcode
from sordino.runtime.collectives import grouped_allreduce_
from sordino.runtime.context import Context
from sordino.runtime.devices import common_device, device_of
from sordino.runtime.process_set import ProcessSet
from sordino.runtime.tensors import describe


class PreparedReduction:
    """All-reduces some tensors in place, together.

    Args:
        tensors: contiguous; they stay where they are.
        op: `Average`, `Sum`, ...
        name: the same on all ranks.
        process_set: the ranks.
    """

    def __init__(
        self, context: Context, tensors: Sequence[torch.Tensor], op: int, name: str, process_set: ProcessSet
    ) -> None:
        self._context, self._tensors = context, list(tensors)
        self._op, self._name, self._process_set = op, name, process_set
        self._full_name = context.operation_name("grouped_allreduce", name, process_set.process_set_id or 0)
        self._described = [describe(tensor, tensor) for tensor in tensors]
        self._device = device_of(common_device(tensors, "the tensors to be averaged"), context)

    def run(self) -> None:
        """Reduce them. Collective."""
        if self._context.outlasts:  # then the result goes to other memory first
            grouped_allreduce_(self._tensors, op=self._op, name=self._name, process_set=self._process_set)
            return
        request = Request(
            opcode.ALLREDUCE,
            self._full_name,
            self._described,
            self._op,
            process_set=self._process_set.process_set_id,
            keep=self._tensors,
            device=self._device,
        )
        self._context.world.run(request).wait()
