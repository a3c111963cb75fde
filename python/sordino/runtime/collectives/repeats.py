"""Fast path of operations on tensors in host memory: one function of the core does all of it.

The function is `context.repeat` (csrc/bindings/repeat.cc). It also does operations for the first time:

    repeat(code, waits, tensor, out, name, set_id, op, prescale, postscale, root, splits)

It returns None for tensors, arguments and worlds that it does not handle. Then `Operation` (operation.py) does the
operation, or raises an error. Blocking calls use `context.repeat_and_note`, which notes their return for a run record.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from sordino._core import Handle
from sordino.errors import UsageError
from sordino.runtime import opcode
from sordino.runtime.context import current
from sordino.runtime.devices import HOST
from sordino.runtime.pending import Pending
from sordino.runtime.process_set import ProcessSet
from sordino.runtime.tensors import from_result

_Tensor = torch.Tensor


def _never() -> bool:
    return False


# Dynamo knows this function, so it costs eager code only a call. Before torch 2.13 it is not used: backward graphs lose
# operators.
is_traced = torch.compiler.is_dynamo_compiling if torch.__version__ >= (2, 13) else _never  # type: ignore[operator]
"""Return whether Dynamo is tracing, so that a collective must be an operator of torch (traced.py)."""


def repeated(result: Any, tensor: torch.Tensor, out: torch.Tensor | None = None) -> Any:
    """Return the result of a blocking operation of which ranks may get different numbers of rows.

    Args:
        result: from `context.repeat`: a tensor, or a handle.
        tensor: the input.
        out: the caller's tensor for the result, if any.
    """
    if type(result) is Handle:
        result = _result(result, tensor, out)
        return result if out is None or result is out else put(result, out)
    return result


def start(
    code: int, tensor: torch.Tensor, out: torch.Tensor | None, name: str | None, process_set: ProcessSet, *options: Any
) -> int | None:
    """Start an operation, and return its handle; None if `Operation` has to start it.

    `options` are the arguments of `context.repeat` from `op` on.
    """
    context, set_id = current(), process_set.process_set_id
    begun = context.repeat(code, False, tensor, out, name, set_id, *options)
    if begun is None:
        return None
    handle, result, full_name = begun

    def finish(handle: Handle) -> Any:
        output = _result(handle, tensor, result)
        if code != opcode.ALLTOALL:
            return output
        return output, torch.tensor(handle.rows, dtype=torch.int32, device=HOST)

    return context.pending.add(Pending(handle, finish, context.epoch, (set_id, full_name)))  # type: ignore[arg-type]


def _result(handle: Handle, tensor: torch.Tensor, expected: Any) -> Any:
    """Return the result of an operation: the core's, if it has allocated one, or else `expected`."""
    others = handle.results
    return from_result(others[0], tensor.dtype, tensor.device) if others else expected


def is_constant(tensor: object, out: torch.Tensor | None = None) -> bool:
    """Return True if autograd's graph needs no node: neither `tensor` nor `out` needs a gradient.

    False for a dual tensor of forward mode (the node refuses it), and while Dynamo traces (it cannot trace the core's
    function).
    """
    if not isinstance(tensor, _Tensor) or is_traced():
        return False
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
        return False
    return not ((tensor.requires_grad or (out is not None and out.requires_grad)) and torch.is_grad_enabled())


def put(result: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Copy a result to the tensor `out`, and return `out`.

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
