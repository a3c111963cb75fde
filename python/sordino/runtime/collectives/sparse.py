"""All-reduce of sparse tensors: every rank gets the entries of all ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sordino.errors import UsageError
from sordino.runtime.collectives.operation import Average, Sum, synchronize_all
from sordino.runtime.collectives.ops import allgather_async
from sordino.runtime.process_set import ProcessSet, global_process_set
from sordino.runtime.tensors import check


def no_rows(parameter: torch.Tensor) -> torch.Tensor:
    """Return a sparse gradient without entries."""
    return torch.sparse_coo_tensor(
        torch.empty((1, 0), dtype=torch.int64, device=parameter.device),
        torch.empty((0, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device),
        parameter.shape,
        check_invariants=False,
    )


def _with_values(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return a sparse tensor with other values, at the same indices."""
    values = values.to(tensor.dtype)
    return torch.sparse_coo_tensor(tensor._indices(), values, tensor.shape, check_invariants=False)


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Start an all-reduce of a sparse COO tensor.

    Indices and values are gathered. So the result is uncoalesced: an index has an entry of each rank that sent one, and
    its value is their sum. Average divides each entry by the number of ranks. For integers it merges the entries of an
    index first, and rounds the quotient toward zero, as in `allreduce`.

    Args:
        tensor: sparse COO, the same shape on all ranks.
        name: name of the operation, the same on all ranks.
        op: Sum or Average.
        process_set: the ranks that take part.

    Returns:
        A function that waits and returns the result.
    """
    if op not in (Average, Sum):
        raise UsageError("a sparse all-reduce supports op=Sum and op=Average only")
    coalesced = tensor.coalesce() if not tensor.is_coalesced() else tensor
    check(coalesced.values())  # before either of the two operations begins
    indices = allgather_async(coalesced.indices().t().contiguous(), name=f"{name}.indices", process_set=process_set)
    values = allgather_async(coalesced.values(), name=f"{name}.values", process_set=process_set)

    def finish() -> torch.Tensor:
        all_values, all_indices = synchronize_all([values, indices])
        result = torch.sparse_coo_tensor(
            all_indices.t(), all_values, tensor.shape, dtype=tensor.dtype, check_invariants=False
        )
        if op != Average:
            return result
        if result.dtype.is_floating_point or result.dtype == torch.bool:
            return _with_values(result, all_values / process_set.size())
        # The sum is divided, because dividing each entry would round each of them.
        result = result.coalesce()
        return _with_values(result, torch.div(result.values(), process_set.size() or 1, rounding_mode="trunc"))

    return finish
