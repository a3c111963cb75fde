"""Collectives within transforms of torch.func, compared with eager autograd and with loops over examples."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.func import grad, jacrev, vmap

import sordino.torch as hvd
from checks.reference import values
from checks.registry import Seat, check

LOSSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "average": lambda x: hvd.allreduce(x).square().sum(),
    "sum": lambda x: hvd.allreduce(x, op=hvd.Sum).square().sum(),
    "grouped": lambda x: sum(y.square().sum() for y in hvd.grouped_allreduce([x, 2 * x])),
    "allgather": lambda x: hvd.allgather(x).square().sum(),
    "broadcast": lambda x: hvd.broadcast(x, 0).square().sum(),
    "reducescatter": lambda x: hvd.reducescatter(x[:-1]).square().sum(),
    "alltoall": lambda x: hvd.alltoall(x).square().sum(),
    "some rows": lambda x: hvd.alltoall(x, splits=[1] * hvd.size())[0].square().sum(),
}


@check(name=tuple(LOSSES))
def gradients_and_examples(seat: Seat, name: str) -> None:
    loss, rows = LOSSES[name], 2 * seat.size
    x = values(seat.rank, (rows, 3), torch.float64)
    leaf = x.clone().requires_grad_()
    loss(leaf).backward()
    torch.testing.assert_close(grad(loss)(x), leaf.grad)
    for axis in (0, 2):
        examples = values(seat.rank, (4, rows, 3) if axis == 0 else (rows, 3, 4), torch.float64)
        for function in (loss, grad(loss)):
            one_by_one = torch.stack([function(one) for one in examples.unbind(axis)])
            torch.testing.assert_close(vmap(function, in_dims=axis)(examples), one_by_one)


@check(name=tuple(LOSSES))
def second_derivatives(seat: Seat, name: str) -> None:
    """The loss is a square, so its gradient is linear: the second derivative maps x to it."""
    loss = LOSSES[name]
    x = values(seat.rank, (seat.size,), torch.float64)
    second = jacrev(grad(loss))(x)
    # Row i of `second` derives the sum over ranks of element i of the gradient, as every derivative here does.
    assert second.shape == (seat.size, seat.size)
    if seat.size == 1:
        torch.testing.assert_close(second @ x, grad(loss)(x))


@check()
def errors(seat: Seat) -> None:
    with pytest.raises(hvd.UsageError, match="Adasum cannot be used within vmap"):
        vmap(lambda x: hvd.allreduce(x, op=hvd.Adasum))(torch.ones(3, 2))
    with pytest.raises(hvd.UsageError, match="scalar inputs"):
        vmap(hvd.reducescatter)(torch.ones(3))
    with pytest.raises(hvd.UsageError, match="same for all examples"):
        splits = torch.ones(3, seat.size, dtype=torch.int32)
        vmap(lambda x, y: hvd.alltoall(x, splits=y)[0])(torch.ones(3, seat.size), splits)
    with pytest.raises(hvd.UsageError, match="no memory to send"):
        vmap(hvd.allreduce_)(torch.ones(3, 2))
