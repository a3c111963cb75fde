"""Nodes of autograd's graph for collectives of eager code.

A backward uses the same nodes, so gradients of any order work (`create_graph=True`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sordino.errors import UsageError
from sordino.runtime.collectives.descriptions import (
    allgather_operation,
    allreduce_operation,
    alltoall_operation,
    broadcast_operation,
    label_of,
    reducescatter_operation,
)
from sordino.runtime.collectives.operation import Average, Reduction, Sum
from sordino.runtime.context import current
from sordino.runtime.process_set import ProcessSet

Tensors = tuple[torch.Tensor, ...]


def run_allreduce(tensors: Sequence[torch.Tensor], name: str | None, settings: Reduction) -> Tensors:
    """All-reduce tensors into new ones, without a node of autograd's graph."""
    label = label_of("allreduce", tensors)
    result: Tensors = allreduce_operation(tensors, False, label, name, settings, tuple).run()
    return result


class BackwardOnly(torch.autograd.Function):
    """Function without derivatives in forward mode."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise UsageError(
            "collectives have no derivatives in forward mode (dual tensors, torch.func.jvp, jacfwd): use "
            "torch.autograd.grad, or torch.func.vjp or jacrev"
        )


class Allreduce(BackwardOnly):
    """Gradient: the same all-reduce of the gradients."""

    @staticmethod
    def forward(ctx: Any, name: str | None, settings: Reduction, *tensors: torch.Tensor) -> Tensors:
        ctx.settings = settings
        return run_allreduce(tensors, name, settings)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return (None, None, *Allreduce.apply(None, ctx.settings, *grads))


class Allgather(BackwardOnly):
    """Gradient: this rank's rows of the average of the gradients."""

    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, *tensors: torch.Tensor) -> Tensors:
        label = label_of("allgather", tensors)
        outputs, rows = allgather_operation(tensors, label, name, process_set, lambda *both: both).run()
        ctx.process_set = process_set
        me = process_set.rank() or 0
        ctx.places = [(sum(counts[:me]), counts[me]) for counts in rows]
        ctx.shapes = [tensor.shape for tensor in tensors]
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        averages = Allreduce.apply(None, Reduction(Average, 1.0, 1.0, ctx.process_set), *grads)
        own = [
            average.narrow(0, start, count).reshape(shape)
            for average, (start, count), shape in zip(averages, ctx.places, ctx.shapes)
        ]
        return (None, None, *own)


class Broadcast(BackwardOnly):
    """Gradient: the average of the gradients on the root, zero elsewhere."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root: int, name: str | None, process_set: ProcessSet) -> torch.Tensor:
        ctx.is_root, ctx.process_set = current().rank == root, process_set
        result: torch.Tensor = broadcast_operation(tensor, False, root, name, process_set).run()
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        (average,) = Allreduce.apply(None, Reduction(Average, 1.0, 1.0, ctx.process_set), grad)
        # Not zeros_like: the result must depend on `average`, so that the next derivative communicates on all ranks.
        everywhere = torch.ones((), dtype=torch.bool, device=average.device)
        return (average if ctx.is_root else average.masked_fill(everywhere, 0), None, None, None)


class Alltoall(BackwardOnly):
    """Gradient: the gradients sent back to the ranks that the rows came from."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet
    ) -> tuple[torch.Tensor, torch.Tensor]:
        output, received = alltoall_operation(tensor, splits, name, process_set, lambda *both: both).run()
        ctx.received, ctx.process_set, ctx.shape = received, process_set, tensor.shape
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[Any, ...]:
        back, _ = Alltoall.apply(grad, ctx.received, None, ctx.process_set)
        rows = ctx.shape[0] if len(ctx.shape) else 1
        if back.shape[0] < rows:
            # Rows beyond the sum of the splits were sent to no rank, so their gradient is zero.
            back = torch.cat([back, back.new_zeros((rows - back.shape[0], *back.shape[1:]))])
        return (back.reshape(ctx.shape), None, None, None)


class Reducescatter(BackwardOnly):
    """Gradient: the allgather of the gradients, scaled as the forward was."""

    @staticmethod
    def forward(ctx: Any, name: str | None, settings: Reduction, *tensors: torch.Tensor) -> Tensors:
        ctx.settings = settings
        label = label_of("reducescatter", tensors)
        result: Tensors = reducescatter_operation(tensors, label, name, settings, tuple).run()
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        settings: Reduction = ctx.settings
        process_set = settings.process_set
        factor = settings.prescale * settings.postscale * ((process_set.size() or 1) if settings.op == Sum else 1)
        return (None, None, *Allgather.apply(None, process_set, *(grad * factor for grad in grads)))
