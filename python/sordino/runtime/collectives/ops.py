"""Collectives that return a handle at once (`..._async`) or work in place (`..._`), of one tensor or of several.

descriptions.py checks their arguments. autograd.py has the differentiable ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sordino.runtime import opcode
from sordino.runtime.collectives.descriptions import (
    allgather_operation,
    allreduce_operation,
    alltoall_operation,
    broadcast_operation,
    reducescatter_operation,
)
from sordino.runtime.collectives.operation import Average, Reduction, Sum, resolve_op
from sordino.runtime.collectives.repeats import start
from sordino.runtime.context import current
from sordino.runtime.process_set import ProcessSet, global_process_set

# ---- all-reduce ----------------------------------------------------------------------------------------------------


def _first(outputs: list[torch.Tensor]) -> torch.Tensor:
    return outputs[0]


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an all-reduce into a new tensor; return a handle for `poll` and `synchronize`.

    result = postscale_factor * fold(op, prescale_factor * tensor of every rank); Average divides by the set's size.
    """
    if average is None:
        handle = start(opcode.ALLREDUCE, tensor, None, name, process_set, op, prescale_factor, postscale_factor)
        if handle is not None:
            return handle
    reduction = Reduction(resolve_op(op, average), prescale_factor, postscale_factor, process_set)
    return allreduce_operation([tensor], False, "allreduce", name, reduction, _first).start()


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an all-reduce in place; return a handle for `poll` and `synchronize`.

    `tensor` must not be used until `synchronize`. Arguments are those of `allreduce`.
    """
    if average is None:
        handle = start(opcode.ALLREDUCE, tensor, tensor, name, process_set, op, prescale_factor, postscale_factor)
        if handle is not None:
            return handle
    reduction = Reduction(resolve_op(op, average), prescale_factor, postscale_factor, process_set)
    return allreduce_operation([tensor], True, "allreduce", name, reduction, _first).start()


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """All-reduce `tensor` in place and return it.

    Arguments and errors are those of `allreduce`.
    """
    if average is None:
        set_id = process_set.process_set_id
        result = current().repeat_and_note(
            opcode.ALLREDUCE, True, tensor, tensor, name, set_id, op, prescale_factor, postscale_factor
        )
        if result is not None:
            return result  # type: ignore[no-any-return]
    reduction = Reduction(resolve_op(op, average), prescale_factor, postscale_factor, process_set)
    return allreduce_operation([tensor], True, "allreduce", name, reduction, _first).run()  # type: ignore[no-any-return]


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an all-reduce of several tensors as one operation; return its handle. Dtypes may differ.

    The result is a tuple of new tensors. Arguments are those of `allreduce`.
    """
    reduction = Reduction(resolve_op(op, average), prescale_factor, postscale_factor, process_set)
    return allreduce_operation(tensors, False, "grouped_allreduce", name, reduction, tuple).start()


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an all-reduce of several tensors in place as one operation; return its handle."""
    reduction = Reduction(resolve_op(op, average), prescale_factor, postscale_factor, process_set)
    return allreduce_operation(tensors, True, "grouped_allreduce", name, reduction, tuple).start()


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[torch.Tensor, ...]:
    """All-reduce several tensors in place and return them.

    Arguments and errors are those of `allreduce`; UsageError also if tensors overlap.
    """
    reduction = Reduction(resolve_op(op, average), prescale_factor, postscale_factor, process_set)
    result: tuple[torch.Tensor, ...] = allreduce_operation(
        tensors, True, "grouped_allreduce", name, reduction, tuple
    ).run()
    return result


# ---- broadcast -----------------------------------------------------------------------------------------------------


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start a broadcast of world rank `root_rank`'s tensor into a new tensor on every rank.

    Arguments are those of `broadcast`.
    """
    handle = start(opcode.BROADCAST, tensor, None, name, process_set, Sum, 1.0, 1.0, root_rank)
    if handle is not None:
        return handle
    return broadcast_operation(tensor, False, root_rank, name, process_set).start()


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start a broadcast of world rank `root_rank`'s tensor into `tensor` itself.

    Arguments are those of `broadcast`.
    """
    handle = start(opcode.BROADCAST, tensor, tensor, name, process_set, Sum, 1.0, 1.0, root_rank)
    if handle is not None:
        return handle
    return broadcast_operation(tensor, True, root_rank, name, process_set).start()


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Broadcast world rank `root_rank`'s tensor into `tensor` and return it.

    Arguments and errors are those of `broadcast`.
    """
    set_id = process_set.process_set_id
    again = current().repeat_and_note(opcode.BROADCAST, True, tensor, tensor, name, set_id, Sum, 1.0, 1.0, root_rank)
    if again is not None:
        return again  # type: ignore[no-any-return]
    result: torch.Tensor = broadcast_operation(tensor, True, root_rank, name, process_set).run()
    return result


# ---- allgather, alltoall, reducescatter ------------------------------------------------------------------------------


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Start a concatenation of all ranks' tensors along the first dimension, which may differ between ranks.

    Arguments are those of `allgather`.
    """
    handle = start(opcode.ALLGATHER, tensor, None, name, process_set)
    if handle is not None:
        return handle
    return allgather_operation([tensor], "allgather", name, process_set, lambda outputs, _: outputs[0]).start()


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start an allgather of several tensors as one operation; the result is a tuple.

    Arguments are those of `allgather`.
    """
    return allgather_operation(
        tensors, "grouped_allgather", name, process_set, lambda outputs, _: tuple(outputs)
    ).start()


def alltoall_async(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start an all-to-all; `synchronize` returns (output, received_splits).

    Arguments are those of `alltoall`.
    """
    if splits is None:
        handle = start(opcode.ALLTOALL, tensor, None, name, process_set)
        if handle is not None:
            return handle
    return alltoall_operation(tensor, splits, name, process_set, lambda *both: both).start()


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start a reduction of which each rank gets its part of the first dimension; return a handle.

    Arguments are those of `reducescatter`.
    """
    handle = start(opcode.REDUCESCATTER, tensor, None, name, process_set, op, prescale_factor, postscale_factor)
    if handle is not None:
        return handle
    reduction = Reduction(resolve_op(op, None), prescale_factor, postscale_factor, process_set)
    return reducescatter_operation([tensor], "reducescatter", name, reduction, _first).start()


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start a reducescatter of several tensors as one operation; the result is a tuple.

    Arguments are those of `reducescatter`.
    """
    reduction = Reduction(resolve_op(op, None), prescale_factor, postscale_factor, process_set)
    return reducescatter_operation(tensors, "grouped_reducescatter", name, reduction, tuple).start()
