"""Operations that all ranks have done before, which need no negotiation (csrc/bindings/repeat.cc).

`context.repeat` is a function of the core. It returns None if an operation has to be done the usual way, as if this
module did not exist. That way also raises all errors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sordino._core import Handle
from sordino.errors import UsageError
from sordino.runtime import opcode
from sordino.runtime.collectives.operation import Sum
from sordino.runtime.context import current
from sordino.runtime.devices import HOST
from sordino.runtime.pending import Pending
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
    """Do an operation again, and return its result; None if it has to be done the usual way.

    Args:
        code: operation code (opcode.py).
        tensor: the input; None for a barrier.
        out: the tensor for the result; None: a new one.
    """
    context = current()
    result = context.repeat(
        code, tensor, out, name, op, prescale, postscale, root, splits, process_set.process_set_id, True
    )
    if result is None:
        return None
    if context.recorder is not None:
        context.note_return()
    if type(result) is Handle:
        assert tensor is not None
        result = _result(result, tensor, None)
        return result if out is None else put(result, out)
    return result


def start(
    code: int,
    tensor: torch.Tensor,
    out: torch.Tensor | None,
    name: str | None,
    process_set: ProcessSet,
    op: int | None = Sum,
    prescale: float = 1.0,
    postscale: float = 1.0,
    root: int = 0,
    splits: list[int] | None = None,
) -> int | None:
    """Start an operation again, and return its handle; None if it has to be started the usual way."""
    context = current()
    set_id = process_set.process_set_id
    begun = context.repeat(code, tensor, out, name, op, prescale, postscale, root, splits, set_id, False)
    if begun is None:
        return None
    handle, result, full_name = begun
    finish: Callable[[Handle], Any] = lambda handle: _result(handle, tensor, result)  # noqa: E731
    if code == opcode.ALLTOALL:
        finish = lambda handle: (  # noqa: E731
            _result(handle, tensor, result),
            torch.tensor(handle.rows, dtype=torch.int32, device=HOST),
        )
    return context.pending.add(Pending(handle, finish, context.epoch, (set_id, full_name)))  # type: ignore[arg-type]


def _result(handle: Handle, tensor: torch.Tensor, expected: Any) -> Any:
    """Return the result of an operation; `expected` unless other ranks have sent more, or less, than before."""
    others = handle.results
    return from_result(others[0], tensor.dtype, tensor.device) if others else expected


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
