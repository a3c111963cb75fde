"""Blocking, out-of-place collectives. They are differentiable, with the same gradients as Horovod's.

A call that needs no gradient goes to the core directly if it can (repeats.py). In code that torch.compile traces, the
functions use operators of torch (traced.py); within transforms of torch.func, transforms.py; otherwise nodes.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sordino.runtime import opcode
from sordino.runtime.collectives import nodes, traced, transforms
from sordino.runtime.collectives.compression import Compression, Compressor
from sordino.runtime.collectives.descriptions import splits_of
from sordino.runtime.collectives.operation import Average, Reduction, Sum, resolve_op
from sordino.runtime.collectives.repeats import is_constant, is_traced, put, repeated
from sordino.runtime.context import current
from sordino.runtime.process_set import ProcessSet, global_process_set

Tensors = tuple[torch.Tensor, ...]

_NO_COMPRESSION = Compression.none
_in_transform = torch._C._are_functorch_transforms_active


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
    if average is None and compression is _NO_COMPRESSION and is_constant(tensor):
        set_id = process_set.process_set_id
        result = current().repeat_and_note(
            opcode.ALLREDUCE, True, tensor, None, name, set_id, op, prescale_factor, postscale_factor
        )
        if result is not None:
            return result  # type: ignore[no-any-return]
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
    packed = [compression.compress(tensor) for tensor in tensors]
    sent = [tensor for tensor, _ in packed]
    if is_traced():
        kind, factors = traced.number_of(op, average), (prescale_factor, postscale_factor)
        reduced = traced.allreduce(sent, name, kind, *factors, traced.place_of(process_set))
    else:
        settings = Reduction(resolve_op(op, average), prescale_factor, postscale_factor, process_set)
        reduced = (transforms.Allreduce if _in_transform() else nodes.Allreduce).apply(name, settings, *sent)
    return [compression.decompress(tensor, state) for tensor, (_, state) in zip(reduced, packed)]


def allgather(
    tensor: torch.Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Concatenate the tensors of all ranks along the first dimension, the only one that may differ. Differentiable.

    A 0-d tensor counts as one row. Every rank gets the rows of all ranks, in rank order. `name`, `process_set` and
    errors are those of `allreduce`.

    `out` receives the result and is returned. The call is then not differentiable. `tensor` may be the part of `out`
    for this rank's rows. Raises UsageError after the operation if `out` has another shape or dtype.
    """
    if is_constant(tensor, out):
        again = current().repeat_and_note(opcode.ALLGATHER, True, tensor, out, name, process_set.process_set_id)
        if again is not None:
            return repeated(again, tensor, out)  # type: ignore[no-any-return]
    result = grouped_allgather([tensor], name, process_set)[0]
    return result if out is None else put(result, out)


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensors:
    """Allgather several tensors as one operation.

    Arguments and errors are those of `allgather`. Returns one result for each tensor, in the same order.
    """
    gathered: Tensors
    if is_traced():
        gathered = tuple(traced.allgather(list(tensors), name, traced.place_of(process_set))[:-1])
    elif _in_transform():
        gathered = transforms.Allgather.apply(name, process_set, transforms.Rows(), *tensors)
    else:
        gathered = nodes.Allgather.apply(name, process_set, *tensors)
    return gathered


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the tensor of world rank `root_rank` on all ranks of the set. Differentiable.

    Shape and dtype must be the same on all ranks. `name`, `process_set` and errors are those of `allreduce`. Raises
    UsageError also if the root is not in the set.
    """
    if is_constant(tensor):
        set_id = process_set.process_set_id
        again = current().repeat_and_note(opcode.BROADCAST, True, tensor, None, name, set_id, Sum, 1.0, 1.0, root_rank)
        if again is not None:
            return again  # type: ignore[no-any-return]
    result: torch.Tensor
    if is_traced():
        result = traced.broadcast(tensor, root_rank, name, traced.place_of(process_set))
    else:
        function = transforms.Broadcast if _in_transform() else nodes.Broadcast
        result = function.apply(tensor, root_rank, name, process_set)
    return result


def alltoall(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    out: torch.Tensor | None = None,
) -> Any:
    """Send `splits[i]` rows to rank i of the set. Return the received rows; with `splits`, (rows, received splits).

    Args:
        tensor: rows along the first dimension; the other dimensions agree between ranks.
        splits: int32, one entry per rank; None: the same number of rows for each rank.
        name: ranks match operations by name; unnamed operations match in order of submission.
        process_set: the ranks that take part.
        out: receives the rows and is returned; needs their shape and dtype. The call is then not differentiable.

    Raises:
        UsageError: as in `allreduce`; also if the number of splits differs from the number of ranks, a split is
            negative, or their sum exceeds the number of rows; after the operation, if `out` does not fit.
        OperationMismatch, PeerLost, Timeout, TransportError: see `synchronize`.
    """
    if splits is None and is_constant(tensor, out):
        again = current().repeat_and_note(opcode.ALLTOALL, True, tensor, out, name, process_set.process_set_id)
        if again is not None:
            return repeated(again, tensor, out)
    if is_traced():
        output, received = traced.alltoall(tensor, splits_of(splits), name, traced.place_of(process_set))
    elif _in_transform():
        output, received = transforms.Alltoall.apply(tensor, splits, name, process_set, transforms.Rows())
    else:
        output, received = nodes.Alltoall.apply(tensor, splits, name, process_set)
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
    """Reduce over the ranks and return this rank's rows. If rows are left over, the first ranks get one more each.

    The tensor is divided along its first dimension. Arguments and errors are those of `allreduce`. Raises UsageError
    also for Adasum and for 0-d tensors.

    `out` receives the result and is returned. The call is then not differentiable. `out` may be this rank's rows of
    `tensor`. Raises UsageError after the operation if `out` has another shape or dtype.
    """
    if compression is _NO_COMPRESSION and is_constant(tensor, out):
        set_id = process_set.process_set_id
        again = current().repeat_and_note(
            opcode.REDUCESCATTER, True, tensor, out, name, set_id, op, prescale_factor, postscale_factor
        )
        if again is not None:
            return repeated(again, tensor, out)  # type: ignore[no-any-return]
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
    packed = [compression.compress(tensor) for tensor in tensors]
    sent = [tensor for tensor, _ in packed]
    if is_traced():
        options = (traced.number_of(op, None), prescale_factor, postscale_factor, traced.place_of(process_set))
        reduced = traced.reducescatter(sent, name, *options)
    else:
        settings = Reduction(resolve_op(op, None), prescale_factor, postscale_factor, process_set)
        reduced = (transforms.Reducescatter if _in_transform() else nodes.Reducescatter).apply(name, settings, *sent)
    return [compression.decompress(tensor, state) for tensor, (_, state) in zip(reduced, packed)]
