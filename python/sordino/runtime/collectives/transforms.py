"""Collectives within transforms of torch.func (grad, vjp, jacrev, vmap, ...).

These are the autograd functions of nodes.py in the form that torch.func needs. It costs some microseconds more, so it
is only used within a transform. A backward uses the same functions, so gradients of any order work. With vmap, one
operation serves all examples: their dimension becomes an ordinary dimension of the tensor. Rows are those of each
example, and all ranks must have the same number of examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sordino.errors import UsageError
from sordino.runtime.collectives.descriptions import (
    allgather_operation,
    alltoall_operation,
    broadcast_operation,
    label_of,
    reducescatter_operation,
)
from sordino.runtime.collectives.nodes import BackwardOnly, run_allreduce
from sordino.runtime.collectives.operation import Adasum, Average, Reduction, Sum
from sordino.runtime.context import current
from sordino.runtime.process_set import ProcessSet

Tensors = tuple[torch.Tensor, ...]


class Rows:
    """Number of rows from each rank in the results of a forward, for its backward.

    Attributes:
        of_results: the numbers, for each result.
    """

    def __init__(self) -> None:
        self.of_results: list[list[int]] = []


def _with_examples_second(tensor: torch.Tensor, dim: int | None) -> torch.Tensor:
    """Return a tensor with its examples moved from dimension `dim` to the second (None: it has no examples)."""
    if dim is None:
        return tensor
    return tensor.unsqueeze(0) if tensor.dim() == 1 else tensor.movedim(dim, 1)


def _second(dims: Sequence[int | None]) -> tuple[int | None, ...]:
    """Return the dimension of the examples in results whose inputs have been through `_with_examples_second`."""
    return tuple(None if dim is None else 1 for dim in dims)


class Allreduce(BackwardOnly):
    """Gradient: the same all-reduce of the gradients."""

    @staticmethod
    def forward(name: str | None, settings: Reduction, *tensors: torch.Tensor) -> Tensors:
        return run_allreduce(tensors, name, settings)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.settings = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return (None, None, *Allreduce.apply(None, ctx.settings, *grads))

    @staticmethod
    def vmap(info: Any, dims: Any, name: str | None, settings: Reduction, *tensors: torch.Tensor) -> tuple[Any, Any]:
        if settings.op == Adasum:
            raise UsageError("op=Adasum cannot be used within vmap: its weights follow from whole tensors")
        return Allreduce.apply(name, settings, *tensors), tuple(dims[2:])


class Broadcast(BackwardOnly):
    """Gradient: the average of the gradients on the root, zero elsewhere."""

    @staticmethod
    def forward(tensor: torch.Tensor, root: int, name: str | None, process_set: ProcessSet) -> torch.Tensor:
        result: torch.Tensor = broadcast_operation(tensor, False, root, name, process_set).run()
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.is_root, ctx.process_set = current().rank == inputs[1], inputs[3]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        (average,) = Allreduce.apply(None, Reduction(Average, 1.0, 1.0, ctx.process_set), grad)
        # Not zeros_like: the result must depend on `average`, so that the next derivative communicates on all ranks.
        everywhere = torch.ones((), dtype=torch.bool, device=average.device)
        return (average if ctx.is_root else average.masked_fill(everywhere, 0), None, None, None)

    @staticmethod
    def vmap(info: Any, dims: Any, tensor: torch.Tensor, *options: Any) -> tuple[Any, Any]:
        return Broadcast.apply(tensor, *options), dims[0]


class Allgather(BackwardOnly):
    """Gradient: this rank's rows of the average of the gradients."""

    @staticmethod
    def forward(name: str | None, process_set: ProcessSet, rows: Rows, *tensors: torch.Tensor) -> Tensors:
        label = label_of("allgather", tensors)
        outputs, rows.of_results = allgather_operation(tensors, label, name, process_set, lambda *both: both).run()
        return tuple(outputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, ctx.process_set, ctx.rows, *tensors = inputs
        ctx.shapes = [tensor.shape for tensor in tensors]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        averages = Allreduce.apply(None, Reduction(Average, 1.0, 1.0, ctx.process_set), *grads)
        me = ctx.process_set.rank() or 0
        own = [
            average.narrow(0, sum(counts[:me]), counts[me]).reshape(shape)
            for average, counts, shape in zip(averages, ctx.rows.of_results, ctx.shapes)
        ]
        return (None, None, None, *own)

    @staticmethod
    def vmap(info: Any, dims: Any, name: Any, process_set: Any, rows: Rows, *tensors: Any) -> tuple[Any, Any]:
        moved = map(_with_examples_second, tensors, dims[3:])
        return Allgather.apply(name, process_set, rows, *moved), _second(dims[3:])


class Alltoall(BackwardOnly):
    """Gradient: the gradients sent back to the ranks that the rows came from."""

    @staticmethod
    def forward(
        tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet, rows: Rows
    ) -> tuple[torch.Tensor, torch.Tensor]:
        output, received = alltoall_operation(tensor, splits, name, process_set, lambda *both: both).run()
        rows.of_results = [received.tolist()]
        return output, received

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        tensor, _, _, ctx.process_set, ctx.rows = inputs
        ctx.shape = tensor.shape
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[Any, ...]:
        back, _ = Alltoall.apply(grad, ctx.rows.of_results[0], None, ctx.process_set, Rows())
        missing = (ctx.shape[0] if len(ctx.shape) else 1) - back.shape[0]
        if missing:  # rows beyond the sum of the splits were sent to no rank, so their gradient is zero
            back = torch.cat([back, back.new_zeros((missing, *back.shape[1:]))])
        return (back.reshape(ctx.shape), None, None, None, None)

    @staticmethod
    def vmap(info: Any, dims: Any, tensor: torch.Tensor, splits: Any, *options: Any) -> tuple[Any, Any]:
        if isinstance(splits, torch.Tensor) and dims[1] is not None:
            raise UsageError("splits= of alltoall must be the same for all examples of a vmap")
        return Alltoall.apply(_with_examples_second(tensor, dims[0]), splits, *options), (1, None)


class Reducescatter(BackwardOnly):
    """Gradient: the allgather of the gradients, scaled as the forward was."""

    @staticmethod
    def forward(name: str | None, settings: Reduction, *tensors: torch.Tensor) -> Tensors:
        label = label_of("reducescatter", tensors)
        result: Tensors = reducescatter_operation(tensors, label, name, settings, tuple).run()
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.settings = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        settings: Reduction = ctx.settings
        size = settings.process_set.size() or 1
        factor = settings.prescale * settings.postscale * (size if settings.op == Sum else 1)
        scaled = [grad * factor for grad in grads]
        return (None, None, *Allgather.apply(None, settings.process_set, Rows(), *scaled))

    @staticmethod
    def vmap(info: Any, dims: Any, name: str | None, settings: Reduction, *tensors: torch.Tensor) -> tuple[Any, Any]:
        if any(dim is not None and tensor.dim() == 1 for tensor, dim in zip(tensors, dims[2:])):
            raise UsageError("Reducescatter does not support scalar inputs")
        moved = map(_with_examples_second, tensors, dims[2:])
        return Reducescatter.apply(name, settings, *moved), _second(dims[2:])
