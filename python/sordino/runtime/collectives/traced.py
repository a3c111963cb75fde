"""Collectives as operators of torch (`torch.ops.sordino`), for code that torch.compile traces.

The functions in autograd.py use an operator while Dynamo traces them. When compiled code runs, the operator does the
collective. So unnamed operations are counted when they run, as in eager code, and it does not matter how often a rank
compiles.

Operators are ordered effects: compilers neither reorder them nor remove one whose result is not used, because other
ranks take part in it (operators.py).

| operator | result | operator for the gradient |
|---|---|---|
| `allreduce` | tensors like the inputs | `allreduce` |
| `broadcast` | a tensor like the input | `allreduce` |
| `allgather` | tensors, then their rows from each rank (int64, on the CPU) | `allgather_backward` |
| `alltoall` | a tensor, then its rows from each rank (int32, on the CPU) | `alltoall_backward` |
| `reducescatter` | tensors with this rank's rows | `reducescatter_backward` |

The number of rows that allgather and alltoall return depends on other ranks, so a compiler treats it as unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sordino.errors import UsageError
from sordino.runtime.collectives.descriptions import (
    allgather_operation,
    allreduce_operation,
    alltoall_operation,
    broadcast_operation,
    label_of,
    reducescatter_operation,
)
from sordino.runtime.collectives.operation import Average, Reduction, Sum, resolve_op
from sordino.runtime.collectives.operators import define, differentiate
from sordino.runtime.context import current
from sordino.runtime.devices import HOST
from sordino.runtime.process_set import ProcessSet, global_process_set

Tensors = Sequence[torch.Tensor]
Place = Sequence[int]

_OPTIONS = "str? name, int op, float prescale, float postscale, int[] place"


def number_of(op: int | None, average: bool | None) -> int:
    """Return the reduction for the arguments `op` and `average`, in a form that Dynamo traces."""
    if average is not None:
        return Average if average else Sum
    return Average if op is None else op


def place_of(process_set: ProcessSet) -> list[int]:
    """Return the number of a process set (-1: not registered), this rank and the number of ranks, for an operator.

    Graphs depend on these numbers, so other numbers need another graph. Dynamo traces this function.
    """
    context, number = current(), process_set.process_set_id
    return [-1 if number is None else number, context.rank, context.size]


def _set_of(place: Place) -> ProcessSet:
    """Return the process set of a result of `place_of`."""
    number = place[0]
    if number == 0:
        return global_process_set
    for process_set in current().process_sets:
        if process_set.process_set_id == number:
            return process_set  # type: ignore[no-any-return]
    raise UsageError("compiled code uses a process set that is not registered; call add_process_set first")


def _reduction(op: int, prescale: float, postscale: float, place: Place) -> Reduction:
    return Reduction(resolve_op(op, None), prescale, postscale, _set_of(place))


def _member(place: Place) -> tuple[int, int]:
    """Return this rank's number in a process set, and the number of its ranks."""
    ranks = _set_of(place).ranks or []
    return ranks.index(current().rank), len(ranks)


def _unknown_rows() -> Any:
    """Return a symbol for a number of rows that the compiler does not know."""
    return torch.library.get_ctx().new_dynamic_size()


# ---- all-reduce and broadcast ----------------------------------------------------------------------------------------


def _run_allreduce(tensors: Tensors, name: str | None, *options: Any) -> list[torch.Tensor]:
    label = label_of("allreduce", tensors)
    result: list[torch.Tensor] = allreduce_operation(tensors, False, label, name, _reduction(*options), list).run()
    return result


def _fake_allreduce(tensors: Tensors, name: str | None, *options: Any) -> list[torch.Tensor]:
    _reduction(*options)
    return [tensor.new_empty(tensor.shape) for tensor in tensors]


def _keep_options(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.options = inputs[2:]


def _back_through_allreduce(ctx: Any, grads: Tensors) -> tuple[Any, ...]:
    return list(allreduce(list(grads), None, *ctx.options)), None, None, None, None, None


def _run_broadcast(tensor: torch.Tensor, root: int, name: str | None, place: Place) -> torch.Tensor:
    result: torch.Tensor = broadcast_operation(tensor, False, root, name, _set_of(place)).run()
    return result


def _keep_root(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, root, _, ctx.place = inputs
    ctx.is_root = current().rank == root


def _back_through_broadcast(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    (average,) = allreduce([grad], None, Average, 1.0, 1.0, ctx.place)
    return average if ctx.is_root else torch.zeros_like(average), None, None, None


# ---- allgather -------------------------------------------------------------------------------------------------------


def _run_allgather(tensors: Tensors, name: str | None, place: Place) -> list[torch.Tensor]:
    label = label_of("allgather", tensors)
    outputs, rows = allgather_operation(tensors, label, name, _set_of(place), lambda *both: both).run()
    return [*outputs, torch.tensor(rows, dtype=torch.int64, device=HOST)]


def _fake_allgather(tensors: Tensors, name: str | None, place: Place) -> list[torch.Tensor]:
    size = _member(place)[1]
    outputs = [
        tensor.new_empty((_rows_of(tensor) if size == 1 else _unknown_rows(), *tensor.shape[1:])) for tensor in tensors
    ]
    return [*outputs, torch.empty((len(tensors), size), dtype=torch.int64, device=HOST)]


def _rows_of(tensor: torch.Tensor) -> int:
    return tensor.shape[0] if tensor.dim() else 1


def _keep_rows(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    tensors, _, ctx.place = inputs
    ctx.save_for_backward(output[-1])
    ctx.mark_non_differentiable(output[-1])
    ctx.counts, ctx.scalars = [_rows_of(tensor) for tensor in tensors], [tensor.dim() == 0 for tensor in tensors]


def _back_through_allgather(ctx: Any, grads: Tensors) -> tuple[Any, ...]:
    own = allgather_backward(list(grads[:-1]), ctx.saved_tensors[0], ctx.counts, ctx.place)
    return [one.reshape(()) if scalar else one for one, scalar in zip(own, ctx.scalars)], None, None


def _run_allgather_backward(
    grads: Tensors, rows: torch.Tensor, counts: Sequence[int], place: Place
) -> list[torch.Tensor]:
    averages = _run_allreduce(grads, None, Average, 1.0, 1.0, place)
    me = _member(place)[0]
    places = [(sum(of_tensor[:me]), of_tensor[me]) for of_tensor in rows.tolist()]
    return [average.narrow(0, *place).clone() for average, place in zip(averages, places)]


def _fake_allgather_backward(
    grads: Tensors, rows: torch.Tensor, counts: Sequence[int], place: Place
) -> list[torch.Tensor]:
    return [grad.new_empty((count, *grad.shape[1:])) for grad, count in zip(grads, counts)]


# ---- alltoall --------------------------------------------------------------------------------------------------------


def _run_alltoall(
    tensor: torch.Tensor, splits: torch.Tensor | None, name: str | None, place: Place
) -> list[torch.Tensor]:
    return list(alltoall_operation(tensor, splits, name, _set_of(place), lambda *both: both).run())


def _fake_alltoall(
    tensor: torch.Tensor, splits: torch.Tensor | None, name: str | None, place: Place
) -> list[torch.Tensor]:
    size = _member(place)[1]
    rows = _rows_of(tensor) if size == 1 and splits is None else _unknown_rows()
    return [tensor.new_empty((rows, *tensor.shape[1:])), torch.empty(size, dtype=torch.int32, device=HOST)]


def _keep_received(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    tensor, _, _, ctx.place = inputs
    ctx.save_for_backward(output[-1])
    ctx.mark_non_differentiable(output[-1])
    ctx.count, ctx.scalar = _rows_of(tensor), tensor.dim() == 0


def _back_through_alltoall(ctx: Any, grads: Tensors) -> tuple[Any, ...]:
    back = alltoall_backward(grads[0], ctx.saved_tensors[0], ctx.count, ctx.place)
    return back.reshape(()) if ctx.scalar else back, None, None, None


def _run_alltoall_backward(grad: torch.Tensor, received: torch.Tensor, count: int, place: Place) -> torch.Tensor:
    back, _ = _run_alltoall(grad, received, None, place)
    missing = count - back.shape[0]  # rows beyond the sum of the splits, which were sent to no rank
    return torch.cat([back, back.new_zeros((missing, *back.shape[1:]))]) if missing else back


def _fake_alltoall_backward(grad: torch.Tensor, received: torch.Tensor, count: int, place: Place) -> torch.Tensor:
    return grad.new_empty((count, *grad.shape[1:]))


# ---- reducescatter ---------------------------------------------------------------------------------------------------


def _run_reducescatter(tensors: Tensors, name: str | None, *options: Any) -> list[torch.Tensor]:
    label = label_of("reducescatter", tensors)
    result: list[torch.Tensor] = reducescatter_operation(tensors, label, name, _reduction(*options), list).run()
    return result


def _fake_reducescatter(tensors: Tensors, name: str | None, *options: Any) -> list[torch.Tensor]:
    reduction = _reduction(*options)
    if any(tensor.dim() == 0 for tensor in tensors):
        raise UsageError("Reducescatter does not support scalar inputs")
    ranks = reduction.process_set.ranks or []
    me, size = ranks.index(current().rank), len(ranks)
    # The first ranks get the rows that do not divide evenly.
    return [tensor.new_empty(((tensor.shape[0] + size - 1 - me) // size, *tensor.shape[1:])) for tensor in tensors]


def _keep_counts(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    tensors, _, op, prescale, postscale, ctx.place = inputs
    size = _member(ctx.place)[1]
    ctx.factor = prescale * postscale * (size if op == Sum else 1)
    ctx.counts = [tensor.shape[0] for tensor in tensors]


def _back_through_reducescatter(ctx: Any, grads: Tensors) -> tuple[Any, ...]:
    scaled = [grad * ctx.factor for grad in grads]
    return list(reducescatter_backward(scaled, ctx.counts, ctx.place)), None, None, None, None, None


def _run_reducescatter_backward(grads: Tensors, counts: Sequence[int], place: Place) -> list[torch.Tensor]:
    return _run_allgather(grads, None, place)[:-1]


def _fake_reducescatter_backward(grads: Tensors, counts: Sequence[int], place: Place) -> list[torch.Tensor]:
    return [grad.new_empty((count, *grad.shape[1:])) for grad, count in zip(grads, counts)]


allreduce = define(f"allreduce(Tensor[] tensors, {_OPTIONS}) -> Tensor[]", _run_allreduce, _fake_allreduce)
broadcast = define(
    "broadcast(Tensor tensor, int root, str? name, int[] place) -> Tensor",
    _run_broadcast,
    lambda tensor, root, name, place: tensor.new_empty(tensor.shape),
)
allgather = define("allgather(Tensor[] tensors, str? name, int[] place) -> Tensor[]", _run_allgather, _fake_allgather)
allgather_backward = define(
    "allgather_backward(Tensor[] grads, Tensor rows, SymInt[] counts, int[] place) -> Tensor[]",
    _run_allgather_backward,
    _fake_allgather_backward,
)
alltoall = define(
    "alltoall(Tensor tensor, Tensor? splits, str? name, int[] place) -> Tensor[]",
    _run_alltoall,
    _fake_alltoall,
)
alltoall_backward = define(
    "alltoall_backward(Tensor grad, Tensor received, SymInt count, int[] place) -> Tensor",
    _run_alltoall_backward,
    _fake_alltoall_backward,
)
reducescatter = define(
    f"reducescatter(Tensor[] tensors, {_OPTIONS}) -> Tensor[]", _run_reducescatter, _fake_reducescatter
)
reducescatter_backward = define(
    "reducescatter_backward(Tensor[] grads, SymInt[] counts, int[] place) -> Tensor[]",
    _run_reducescatter_backward,
    _fake_reducescatter_backward,
)
differentiate(allreduce, _back_through_allreduce, _keep_options)
differentiate(broadcast, _back_through_broadcast, _keep_root)
differentiate(allgather, _back_through_allgather, _keep_rows)
differentiate(alltoall, _back_through_alltoall, _keep_received)
differentiate(reducescatter, _back_through_reducescatter, _keep_counts)
