"""Blocking operations that all ranks have done before, which need no negotiation (csrc/bindings/repeat.cc)."""

from __future__ import annotations

from typing import Any

import torch

from sordino._core import Handle
from sordino.errors import UsageError
from sordino.runtime.collectives.operation import Sum
from sordino.runtime.context import current
from sordino.runtime.process_set import ProcessSet
from sordino.runtime.tensors import from_result


def repeat(
    code: int,
    tensor: torch.Tensor | None,
    out: torch.Tensor | None,
    name: str | None,
    process_set: ProcessSet,
    op: int | None = Sum,
    prescale: float = 1.0,
    postscale: float = 1.0,
    root: int = 0,
    splits: list[int] | None = None,
) -> Any:
    """Do an operation again, and return its result; None if it has to be done the usual way, as if this did not exist.

    Args:
        code: operation code (opcode.py).
        tensor: the input; None for a barrier.
        out: the tensor for the result; None: a new one.
    """
    context = current()
    result = context.repeat(
        code,
        tensor,
        out,
        name,
        op,
        prescale,
        postscale,
        root,
        splits,
        process_set.process_set_id,
        context.pending.taken,
    )
    if result is None:
        return None
    context.note_return()
    if type(result) is Handle:  # other ranks have sent more, or less, than before
        assert tensor is not None
        result = from_result(result.results[0], tensor.dtype, tensor.device)
        return result if out is None else put(result, out)
    return result


def is_constant(tensor: object) -> bool:
    """Return whether no gradient flows through a tensor, so that its operation needs no node in autograd's graph."""
    return isinstance(tensor, torch.Tensor) and not (tensor.requires_grad and torch.is_grad_enabled())


def put(result: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Copy a result to the tensor `out`, and return that.

    Raises:
        UsageError: `out` has another shape or dtype, or a gradient flows through it or through the result.
    """
    if result.requires_grad or (out.requires_grad and torch.is_grad_enabled()):
        raise UsageError("out= is not differentiable: call it in torch.no_grad(), or leave out= away")
    if out.shape != result.shape or out.dtype != result.dtype:
        raise UsageError(
            f"out= has shape {tuple(out.shape)} and dtype {out.dtype}; the result has shape {tuple(result.shape)} and "
            f"dtype {result.dtype}. The operation is over on all ranks"
        )
    return out.copy_(result)
