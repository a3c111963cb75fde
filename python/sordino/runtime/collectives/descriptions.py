"""Descriptions of collectives: each function checks the arguments of a collective, and returns its `Operation`.

`ops.py`, `nodes.py`, `transforms.py` and `traced.py` start the operations for their callers. `collect` arguments are
functions that make the result for the caller from the outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from sordino._core import Handle
from sordino.errors import UsageError
from sordino.runtime import opcode
from sordino.runtime.collectives.operation import Adasum, Operation, Reduction
from sordino.runtime.devices import HOST
from sordino.runtime.process_set import ProcessSet
from sordino.runtime.tensors import as_tensor, check, contiguous, from_result
from sordino.runtime.versions import note_change


def label_of(kind: str, tensors: Sequence[torch.Tensor]) -> str:
    """Return the label of an operation of this kind on one or more tensors."""
    return kind if len(tensors) == 1 else f"grouped_{kind}"


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


def _even_splits(tensor: torch.Tensor, process_set: ProcessSet) -> list[int]:
    """Return the same number of rows for each member; [] if the rows cannot be divided, or if there are no members."""
    members = process_set.size() or 0
    rows = tensor.shape[0] if tensor.dim() else 1
    return [rows // members] * members if members and rows % members == 0 else []


def splits_of(splits: Any) -> torch.Tensor | None:
    """Return the splits of an all-to-all as a tensor. Whole numbers become int32; a tensor is returned unchanged."""
    if splits is None or isinstance(splits, torch.Tensor):
        return splits
    table = torch.tensor(splits, device=HOST)
    return table if table.is_floating_point() else torch.tensor(splits, dtype=torch.int32, device=HOST)


def alltoall_operation(
    tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet, collect: Callable[..., Any]
) -> Operation:
    """Describe an all-to-all: `splits[i]` rows to member i. `collect(output, received_splits)` makes the result."""
    dense = check(tensor)
    source = contiguous(dense.reshape(1) if dense.dim() == 0 else dense)
    members = process_set.size() or 0
    rows = source.shape[0]
    table = splits_of(splits)
    if table is None or table.numel() == 0:
        counts = _even_splits(source, process_set)
        if members and not counts:
            raise UsageError(
                f"splits not provided, but first dimension of tensor ({rows}) is not an even multiple of the number of "
                f"workers ({members})."
            )
    else:
        if table.dim() != 1:
            raise UsageError("alltoall expects a 1D splits tensor")
        if table.dtype != torch.int32:
            raise UsageError(f"alltoall expects splits to contain 32-bit integer elements, not {table.dtype}.")
        counts = table.tolist()
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
