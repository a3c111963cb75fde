"""Reductions of torch.distributed: their names here, their factors, and bitwise reductions of gathered rows."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed

from sordino.errors import UsageError
from sordino.runtime.collectives.operation import Average, Max, Min, Product, Sum
from sordino.runtime.dtypes import DTYPE_CODES

dist: Any = torch.distributed  # its annotations lack much of what a backend uses

Kinds = dist.ReduceOp.RedOpType

OPS = {Kinds.SUM: Sum, Kinds.AVG: Average, Kinds.MIN: Min, Kinds.MAX: Max, Kinds.PRODUCT: Product}
BITWISE = {Kinds.BAND: torch.bitwise_and, Kinds.BOR: torch.bitwise_or, Kinds.BXOR: torch.bitwise_xor}


def kind_of(op: Any) -> tuple[Any, float]:
    """Return the kind of a reduction of torch.distributed, without a factor, and its factor.

    Raises:
        UsageError: the reduction is not supported.
    """
    kind = Kinds(op.op) if isinstance(op, dist.ReduceOp) else Kinds(op)
    if kind == Kinds.PREMUL_SUM:
        return Kinds.SUM, float(op.__getstate__()[1])  # torch 2.13 and newer have op.factor
    if kind not in OPS and kind not in BITWISE:
        raise UsageError(f"the reduction {kind} is not supported")
    return kind, 1.0


def require_reducible(kind: Any, tensor: torch.Tensor) -> None:
    """Raise UsageError for a tensor that the core cannot reduce. It reduces complex numbers as pairs of real ones."""
    if tensor.dtype in DTYPE_CODES:
        return
    if not tensor.is_complex():
        raise UsageError(f"tensors of {tensor.dtype} can be moved, but not reduced. Convert them, such as to bfloat16")
    if kind not in (Kinds.SUM, Kinds.AVG):
        raise UsageError(f"a reduction of complex tensors must be SUM or AVG, not {kind}")


@torch.no_grad()
def mean_of_total(total: torch.Tensor, size: int) -> None:
    """Divide a sum over ranks, in place, by their number. Integers are rounded towards 0."""
    total.div_(size, rounding_mode=None if total.is_floating_point() or total.is_complex() else "trunc")


def combined(kind: Any, rows: torch.Tensor) -> torch.Tensor:
    """Return the bitwise reduction of rows. Raises UsageError if they are not integers or bools."""
    if rows.dtype.is_floating_point or rows.dtype.is_complex:
        raise UsageError(f"a bitwise reduction needs integers or bools, not {rows.dtype}")
    result = rows[0]
    for row in rows[1:]:
        result = BITWISE[kind](result, row)
    return result
