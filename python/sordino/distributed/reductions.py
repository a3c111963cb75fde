"""Reductions of torch.distributed: their names here, their factors, and bitwise reductions of gathered rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed

from sordino.errors import UsageError
from sordino.runtime.collectives.operation import Average, Max, Min, Product, Sum
from sordino.runtime.dtypes import DTYPE_CODES

dist: Any = torch.distributed  # its annotations lack much of what a backend uses

Kinds = dist.ReduceOp.RedOpType


class Kind(NamedTuple):
    """A kind of reduction, without a factor.

    Attributes:
        name: its name in torch.
        code: its code in the core; None if it is bitwise.
        combine: for a bitwise one: the function of two tensors.
    """

    name: str
    code: int | None = None
    combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None


SUM = Kind("SUM", Sum)
_SUPPORTED = (
    *(SUM, Kind("AVG", Average), Kind("MIN", Min), Kind("MAX", Max), Kind("PRODUCT", Product)),
    *(Kind("BAND", None, torch.bitwise_and), Kind("BOR", None, torch.bitwise_or)),
    Kind("BXOR", None, torch.bitwise_xor),
)
# By the number in torch. Its hash is the only one of an operation's attributes that takes less than a microsecond.
_BY_NUMBER = {hash(dist.ReduceOp(getattr(Kinds, kind.name))): kind for kind in _SUPPORTED}


def kind_of(op: Any) -> tuple[Kind, float]:
    """Return the kind of a reduction of torch.distributed, and its factor.

    Raises:
        UsageError: the reduction is not supported.
    """
    kind = _BY_NUMBER.get(hash(op))
    if kind is not None:
        return kind, 1.0
    given = Kinds(op.op) if isinstance(op, dist.ReduceOp) else Kinds(op)
    if given == Kinds.PREMUL_SUM:
        return SUM, float(op.__getstate__()[1])  # torch 2.13 and newer have op.factor
    raise UsageError(f"the reduction {given} is not supported")


def require_reducible(kind: Kind, tensor: torch.Tensor) -> None:
    """Raise UsageError for a tensor that the core cannot reduce. It reduces complex numbers as pairs of real ones."""
    if tensor.dtype in DTYPE_CODES:
        return
    if not tensor.is_complex():
        raise UsageError(f"tensors of {tensor.dtype} can be moved, but not reduced. Convert them, such as to bfloat16")
    if kind.code not in (Sum, Average):
        raise UsageError(f"a reduction of complex tensors must be SUM or AVG, not {kind.name}")


@torch.no_grad()
def mean_of_total(total: torch.Tensor, size: int) -> None:
    """Divide a sum over ranks, in place, by their number. Integers are rounded towards 0."""
    total.div_(size, rounding_mode=None if total.is_floating_point() or total.is_complex() else "trunc")


def combined(combine: Callable[..., torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """Return the bitwise reduction of rows. Raises UsageError if they are not integers or bools."""
    if rows.dtype.is_floating_point or rows.dtype.is_complex:
        raise UsageError(f"a bitwise reduction needs integers or bools, not {rows.dtype}")
    result = rows[0]
    for row in rows[1:]:
        result = combine(result, row)
    return result
