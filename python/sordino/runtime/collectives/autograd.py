"""Blocking, out-of-place collectives. They are differentiable, with the same gradients as Horovod's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sordino.runtime import opcode
from sordino.runtime.collectives.compression import Compression, Compressor
from sordino.runtime.collectives.operation import Average, Reduction, Sum, resolve_op
from sordino.runtime.collectives.ops import (
    allgather_operation,
    allreduce_operation,
    alltoall_operation,
    broadcast_operation,
    reducescatter_operation,
)
from sordino.runtime.collectives.repeats import is_constant, put, repeated
from sordino.runtime.context import current
from sordino.runtime.process_set import ProcessSet, global_process_set

Tensors = tuple[torch.Tensor, ...]


def _allreduce(tensors: Sequence[torch.Tensor], name: str | None, settings: Reduction) -> Tensors:
    label = "allreduce" if len(tensors) == 1 else "grouped_allreduce"
    result: Tensors = allreduce_operation(tensors, False, label, name, settings, tuple).run()
    return result


class _Allreduce(torch.autograd.Function):
    """Gradient: the same all-reduce of the gradients."""

    @staticmethod
    def forward(ctx: Any, name: str | None, settings: Reduction, *tensors: torch.Tensor) -> Tensors:
        ctx.settings = settings
        return _allreduce(tensors, name, settings)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return (None, None, *_allreduce(grads, None, ctx.settings))


class _Allgather(torch.autograd.Function):
    """Gradient: this rank's rows of the average of the gradients."""

    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, *tensors: torch.Tensor) -> Tensors:
        label = "allgather" if len(tensors) == 1 else "grouped_allgather"
        outputs, rows = allgather_operation(tensors, label, name, process_set, lambda *both: both).run()
        ctx.process_set = process_set
        me = process_set.rank() or 0
        ctx.places = [(sum(counts[:me]), counts[me]) for counts in rows]
        ctx.shapes = [tensor.shape for tensor in tensors]
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        averages = _allreduce(grads, None, Reduction(Average, 1.0, 1.0, ctx.process_set))
        own = [
            average.narrow(0, start, count).reshape(shape)
            for average, (start, count), shape in zip(averages, ctx.places, ctx.shapes)
        ]
        return (None, None, *own)


class _Broadcast(torch.autograd.Function):
    """Gradient: the average of the gradients on the root, zero elsewhere."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root: int, name: str | None, process_set: ProcessSet) -> torch.Tensor:
        ctx.is_root, ctx.process_set = current().rank == root, process_set
        result: torch.Tensor = broadcast_operation(tensor, False, root, name, process_set).run()
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        (average,) = _allreduce([grad], None, Reduction(Average, 1.0, 1.0, ctx.process_set))
        return (average if ctx.is_root else torch.zeros_like(average), None, None, None)


class _Alltoall(torch.autograd.Function):
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
        back: torch.Tensor = alltoall_operation(
            grad, ctx.received, None, ctx.process_set, lambda output, _: output
        ).run()
        rows = ctx.shape[0] if len(ctx.shape) else 1
        if back.shape[0] < rows:
            # Rows beyond the sum of the splits were sent to no rank, so their gradient is zero.
            back = torch.cat([back, back.new_zeros((rows - back.shape[0], *back.shape[1:]))])
        return (back.reshape(ctx.shape), None, None, None)


class _Reducescatter(torch.autograd.Function):
    """Gradient: the allgather of the gradients, scaled as the forward was."""

    @staticmethod
    def forward(ctx: Any, name: str | None, settings: Reduction, *tensors: torch.Tensor) -> Tensors:
        ctx.settings = settings
        label = "reducescatter" if len(tensors) == 1 else "grouped_reducescatter"
        result: Tensors = reducescatter_operation(tensors, label, name, settings, tuple).run()
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        settings: Reduction = ctx.settings
        process_set = settings.process_set
        factor = settings.prescale * settings.postscale * ((process_set.size() or 1) if settings.op == Sum else 1)
        label = "allgather" if len(grads) == 1 else "grouped_allgather"
        scaled = [grad * factor for grad in grads]
        outputs = allgather_operation(scaled, label, None, process_set, lambda outputs, _: outputs).run()
        return (None, None, *outputs)


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce a tensor over the ranks of a set and return the result on all of them. Collective, differentiable.

    Args:
        tensor: any shape; the same shape and dtype on all ranks.
        average: deprecated, use `op`.
        name: ranks match operations by name; unnamed operations match in order of submission.
        compression: applied before the reduction and undone after it.
        op: Average (default), Sum, Adasum, Min, Max or Product.
        prescale_factor: multiplies the input.
        postscale_factor: multiplies the result.
        process_set: the ranks that take part.

    Returns:
        A new tensor of the same shape and dtype.

    Raises:
        UsageError: the tensor is sparse or has a dtype without kernels in the core, or an argument is invalid.
        NotBuilt: this build does not support the tensor's kind of device.
        OperationMismatch, PeerLost, Timeout, TransportError: see `synchronize`.
    """
    if average is None and compression is Compression.none and is_constant(tensor):
        context, set_id = current(), process_set.process_set_id
        result = context.repeat(
            opcode.ALLREDUCE, True, tensor, None, name, set_id, op, prescale_factor, postscale_factor
        )
        if result is not None:
            return repeated(context, result, tensor)  # type: ignore[no-any-return]
    factors = (prescale_factor, postscale_factor)
    return grouped_allreduce([tensor], average, name, compression, op, *factors, process_set)[0]


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """All-reduce several tensors as one operation. They may have different dtypes and shapes.

    Arguments and errors are those of `allreduce`. Returns one result for each tensor, in the same order.
    """
    settings = Reduction(resolve_op(op, average), prescale_factor, postscale_factor, process_set)
    packed = [compression.compress(tensor) for tensor in tensors]
    reduced = _Allreduce.apply(name, settings, *(tensor for tensor, _ in packed))
    return [compression.decompress(tensor, state) for tensor, (_, state) in zip(reduced, packed)]


def allgather(
    tensor: torch.Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Concatenate the tensors of all ranks along the first dimension, in which they may differ. Differentiable.

    A 0-d tensor counts as one row. Every rank gets the rows of all ranks, in rank order. `name`, `process_set` and
    errors are those of `allreduce`.

    `out` is a tensor for the result, of its shape and dtype, which is returned. Not differentiable. `tensor` may be a
    part of it, at the place of this rank's rows. UsageError, after the operation, if shape or dtype differ.
    """
    if is_constant(tensor, out):
        context = current()
        again = context.repeat(opcode.ALLGATHER, True, tensor, out, name, process_set.process_set_id)
        if again is not None:
            return repeated(context, again, tensor, out)  # type: ignore[no-any-return]
    result = grouped_allgather([tensor], name, process_set)[0]
    return result if out is None else put(result, out)


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensors:
    """Allgather several tensors as one operation.

    Arguments and errors are those of `allgather`. Returns one result for each tensor, in the same order.
    """
    gathered: Tensors = _Allgather.apply(name, process_set, *tensors)
    return gathered


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return world rank `root_rank`'s tensor, on every rank. Differentiable.

    Shape and dtype must be the same on all ranks. `name`, `process_set` and errors are those of `allreduce`; UsageError
    also if the root is not in the process set.
    """
    if is_constant(tensor):
        context, set_id = current(), process_set.process_set_id
        again = context.repeat(opcode.BROADCAST, True, tensor, None, name, set_id, Sum, 1.0, 1.0, root_rank)
        if again is not None:
            return repeated(context, again, tensor)  # type: ignore[no-any-return]
    result: torch.Tensor = _Broadcast.apply(tensor, root_rank, name, process_set)
    return result


def alltoall(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    out: torch.Tensor | None = None,
) -> Any:
    """Send `splits[i]` rows to rank i and return the rows received; (output, received_splits) if splits were given.

    Args:
        tensor: rows along the first dimension; the other dimensions agree between ranks.
        splits: int32, one entry per rank; None: the same number of rows for each rank.
        name: ranks match operations by name; unnamed operations match in order of submission.
        process_set: the ranks that take part.
        out: tensor for the rows received, of their shape and dtype, which is returned. Not differentiable.

    Raises:
        UsageError: as in `allreduce`; also if the number of splits differs from the number of ranks, a split is
            negative, or their sum exceeds the number of rows; after the operation, if `out` does not fit.
        OperationMismatch, PeerLost, Timeout, TransportError: see `synchronize`.
    """
    if splits is None and is_constant(tensor, out):
        context = current()
        again = context.repeat(opcode.ALLTOALL, True, tensor, out, name, process_set.process_set_id)
        if again is not None:
            return repeated(context, again, tensor, out)
    output, received = _Alltoall.apply(tensor, splits, name, process_set)
    if out is not None:
        output = put(output, out)
    return output if splits is None else (output, received)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Reduce over the ranks and return this rank's rows. The first ranks get the rows that do not divide evenly.

    The tensor needs at least one dimension, along which it is divided. Arguments and errors are those of `allreduce`;
    UsageError also for Adasum and for 0-d tensors.

    `out` is a tensor for the result, of its shape and dtype, which is returned. Not differentiable. It may be this
    rank's rows of `tensor`. UsageError, after the operation, if shape or dtype differ.
    """
    if compression is Compression.none and is_constant(tensor, out):
        context, set_id = current(), process_set.process_set_id
        again = context.repeat(
            opcode.REDUCESCATTER, True, tensor, out, name, set_id, op, prescale_factor, postscale_factor
        )
        if again is not None:
            return repeated(context, again, tensor, out)  # type: ignore[no-any-return]
    factors = (prescale_factor, postscale_factor)
    result = grouped_reducescatter([tensor], name, compression, op, process_set, *factors)[0]
    return result if out is None else put(result, out)


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Reduce-scatter several tensors as one operation.

    Arguments and errors are those of `reducescatter`. Returns one result for each tensor, in the same order.
    """
    settings = Reduction(resolve_op(op, None), prescale_factor, postscale_factor, process_set)
    packed = [compression.compress(tensor) for tensor in tensors]
    reduced = _Reducescatter.apply(name, settings, *(tensor for tensor, _ in packed))
    return [compression.decompress(tensor, state) for tensor, (_, state) in zip(reduced, packed)]
