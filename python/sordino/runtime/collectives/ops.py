"""Eager collectives: asynchronous, in place and grouped. `autograd.py` adds differentiable ones."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import torch

from sordino._core import Handle, Request
from sordino.errors import UsageError
from sordino.runtime import opcode
from sordino.runtime.collectives.operation import Adasum, Average, Operation, Reduction, Sum, resolve_op
from sordino.runtime.collectives.repeats import repeated, start
from sordino.runtime.context import Context, current, use
from sordino.runtime.devices import HOST
from sordino.runtime.process_set import ProcessSet, global_process_set
from sordino.runtime.tensors import as_tensor, check, contiguous, from_result
from sordino.runtime.versions import note_change


def label_of(kind: str, tensors: Sequence[torch.Tensor]) -> str:
    """Return the label of an operation of this kind on one or more tensors."""
    return kind if len(tensors) == 1 else f"grouped_{kind}"


# ---- all-reduce ----------------------------------------------------------------------------------------------------


def allreduce_operation(
    tensors: Sequence[torch.Tensor],
    in_place: bool,
    label: str,
    name: str | None,
    reduction: Reduction,
    collect: Callable[[list[torch.Tensor]], Any],
) -> Operation:
    """Describe an all-reduce of one or more tensors. `collect` makes the result from the list of outputs."""
    if not tensors:
        raise UsageError(f"{label} needs at least one tensor")
    if in_place and len(tensors) > 1:
        _require_apart(label, [as_tensor(tensor) for tensor in tensors])
    sources, outputs, copies = [], [], []
    for tensor in tensors:
        dense = check(tensor)
        if reduction.op == Adasum and not dense.is_floating_point():
            raise UsageError(f"Adasum needs floating-point tensors, not {dense.dtype}")
        source = contiguous(dense)
        if in_place:
            target = source
            if source is not dense and source.data_ptr() != dense.data_ptr():
                copies.append((dense, source))
            outputs.append(tensor)
        else:
            target = torch.empty(dense.shape, dtype=dense.dtype, device=dense.device)
            outputs.append(target)
        sources.append((source, target))
    if in_place:
        note_change([as_tensor(tensor) for tensor in tensors])

    def finish(_: Handle) -> Any:
        for original, result in copies:
            original.copy_(result)
        return collect(outputs)

    return Operation(opcode.ALLREDUCE, label, name, sources, finish, reduction.process_set, **reduction.options())


def _require_apart(label: str, tensors: Sequence[torch.Tensor]) -> None:
    spans = sorted((t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in tensors if t.is_contiguous())
    if any(end > start for (_, end), (start, _) in pairwise(spans)):
        raise UsageError(f"{label}: tensors of one group overlap, so they cannot all be reduced in place")


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
        context, set_id = current(), process_set.process_set_id
        result = context.repeat(
            opcode.ALLREDUCE, True, tensor, tensor, name, set_id, op, prescale_factor, postscale_factor
        )
        if result is not None:
            return repeated(context, result, tensor)  # type: ignore[no-any-return]
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


def broadcast_operation(
    tensor: torch.Tensor, in_place: bool, root_rank: int, name: str | None, process_set: ProcessSet
) -> Operation:
    """Describe a broadcast from world rank `root_rank`."""
    dense = check(tensor)
    members = process_set.ranks or []
    if root_rank not in members:
        raise UsageError(f"broadcast received invalid root rank {root_rank} for provided process set {process_set}")
    source = contiguous(dense)
    target = source if in_place else torch.empty(dense.shape, dtype=dense.dtype, device=dense.device)
    if in_place:
        note_change([dense])

    def finish(_: Handle) -> torch.Tensor:
        if not in_place:
            return target
        if source.data_ptr() != dense.data_ptr():
            dense.copy_(source)
        return tensor

    return Operation(opcode.BROADCAST, "broadcast", name, [(source, target)], finish, process_set, root=int(root_rank))


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
    context, set_id = current(), process_set.process_set_id
    again = context.repeat(opcode.BROADCAST, True, tensor, tensor, name, set_id, Sum, 1.0, 1.0, root_rank)
    if again is not None:
        return repeated(context, again, tensor)  # type: ignore[no-any-return]
    result: torch.Tensor = broadcast_operation(tensor, True, root_rank, name, process_set).run()
    return result


# ---- allgather, alltoall, reducescatter ------------------------------------------------------------------------------


def allgather_operation(
    tensors: Sequence[torch.Tensor], label: str, name: str | None, process_set: ProcessSet, collect: Callable[..., Any]
) -> Operation:
    """Describe a concatenation along the first dimension, which may differ between ranks.

    A 0-d tensor counts as one row. `collect(outputs, rows)` gets the gathered tensors, and for each the number of rows
    from every rank.
    """
    if not tensors:
        raise UsageError(f"{label} needs at least one tensor")
    sources = []
    for tensor in tensors:
        dense = check(tensor)
        sources.append(contiguous(dense.reshape(1) if dense.dim() == 0 else dense))

    def finish(handle: Handle) -> Any:
        outputs = [from_result(result, source.dtype, source.device) for result, source in zip(handle.results, sources)]
        rows = handle.rows
        parts = len(rows) // len(sources)
        return collect(outputs, [rows[index * parts : (index + 1) * parts] for index in range(len(sources))])

    return Operation(opcode.ALLGATHER, label, name, [(source, None) for source in sources], finish, process_set)


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


def even_splits(tensor: torch.Tensor, process_set: ProcessSet) -> list[int]:
    """Return the same number of rows for each member; [] if the rows cannot be divided, or if there are no members."""
    members = process_set.size() or 0
    rows = tensor.shape[0] if tensor.dim() else 1
    return [rows // members] * members if members and rows % members == 0 else []


def alltoall_operation(
    tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet, collect: Callable[..., Any]
) -> Operation:
    """Describe an all-to-all: `splits[i]` rows to member i. `collect(output, received_splits)` makes the result."""
    dense = check(tensor)
    source = contiguous(dense.reshape(1) if dense.dim() == 0 else dense)
    members = process_set.size() or 0
    rows = source.shape[0]
    if splits is None or len(splits) == 0:
        counts = even_splits(source, process_set)
        if members and not counts:
            raise UsageError(
                f"splits not provided, but first dimension of tensor ({rows}) is not an even multiple of the number of "
                f"workers ({members})."
            )
    else:
        table = torch.as_tensor(splits, dtype=None if isinstance(splits, torch.Tensor) else torch.int32, device=HOST)
        if table.dim() != 1:
            raise UsageError("alltoall expects a 1D splits tensor")
        if table.dtype != torch.int32:
            raise UsageError(f"alltoall expects splits to contain 32-bit integer elements, not {table.dtype}.")
        counts = [int(count) for count in table]
        if len(counts) != members:
            raise UsageError(
                f"Number of entries in splits ({len(counts)}) does not equal number of workers ({members})."
            )
        if any(count < 0 for count in counts):
            raise UsageError(f"splits must not be negative: {counts}")
        if sum(counts) > rows:
            raise UsageError(
                f"Sum of splits entries ({sum(counts)}) is greater than the first dimension of tensor ({rows})."
            )

    def finish(handle: Handle) -> Any:
        received = torch.tensor(handle.rows, dtype=torch.int32, device=HOST)
        return collect(from_result(handle.results[0], source.dtype, source.device), received)

    return Operation(opcode.ALLTOALL, "alltoall", name, [(source, None)], finish, process_set, splits=counts)


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


def reducescatter_operation(
    tensors: Sequence[torch.Tensor],
    label: str,
    name: str | None,
    reduction: Reduction,
    collect: Callable[[list[torch.Tensor]], Any],
) -> Operation:
    """Describe a reduction of which each member gets its rows. The first members get the extra rows."""
    if not tensors:
        raise UsageError(f"{label} needs at least one tensor")
    if reduction.op == Adasum:
        raise UsageError("Reducescatter does not support Adasum.")
    sources = []
    for tensor in tensors:
        dense = check(tensor)
        if dense.dim() == 0:
            raise UsageError("Reducescatter does not support scalar inputs")
        sources.append(contiguous(dense))

    def finish(handle: Handle) -> Any:
        pairs = zip(handle.results, sources)
        return collect([from_result(result, source.dtype, source.device) for result, source in pairs])

    pairs = [(source, None) for source in sources]
    return Operation(opcode.REDUCESCATTER, label, name, pairs, finish, reduction.process_set, **reduction.options())


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


# ---- join, barrier ---------------------------------------------------------------------------------------------------


def _stand_in(context: Context) -> None:
    """Call `context.callbacks.while_joined` in parallel threads, because the other ranks may need them in any order."""
    work = context.callbacks.while_joined.living()

    def run(one: Callable[[], None]) -> None:
        with use(context):
            one()

    if work:
        with ThreadPoolExecutor(len(work)) as threads:
            for result in [threads.submit(run, one) for one in work]:
                result.result()


def join(device: int = -1) -> int:
    """Announce that this rank has no more data, and wait until all ranks have. Collective.

    Until then this rank contributes zeros to other ranks' all-reduces (Average still divides by the full size), and
    their barriers do not wait for it. Their other operations raise OperationMismatch, as zeros cannot replace its data.

    Args:
        device: ignored; exists for compatibility with Horovod.

    Returns:
        The rank that joined last, the same on all ranks.
    """
    context = current()
    if context.callbacks.while_joined:
        gc.collect()  # objects that other ranks have released must not wait for them here
    for prepare in context.callbacks.on_join.living():
        prepare()
    handle = context.world.submit(Request(opcode.JOIN, "join", []))
    _stand_in(context)
    handle.wait()
    context.names.joined()
    context.note_return()
    return handle.last_rank


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of the set have called this. Collective."""
    context = current()
    if context.repeat(opcode.BARRIER, True, None, None, "barrier", process_set.process_set_id):
        repeated(context, True, None)
    else:
        Operation(opcode.BARRIER, "barrier", "barrier", [], lambda _: None, process_set).run()
