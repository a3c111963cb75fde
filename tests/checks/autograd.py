"""Gradients through the collectives: Horovod's conventions, checked by formula on every rank."""

from __future__ import annotations

import pytest
import torch

import sordino.torch as hvd
from checks.reference import values
from checks.registry import Seat, check

FOLDS = {"Sum": hvd.Sum, "Average": hvd.Average, "Min": hvd.Min, "Max": hvd.Max}


def leaf(seat: Seat, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return values(seat.rank, shape, dtype).requires_grad_()


def upstream(rank: int, *shape: int) -> torch.Tensor:
    """Return the gradient with respect to this rank's output."""
    return values(rank, shape, torch.float64, seed=123)


def all_upstream(seat: Seat, *shape: int) -> torch.Tensor:
    return torch.stack([upstream(rank, *shape) for rank in range(seat.size)])


def close(actual: torch.Tensor | None, wanted: torch.Tensor) -> None:
    assert actual is not None
    torch.testing.assert_close(actual, wanted, atol=1e-12, rtol=1e-12)


@check(op=FOLDS, factors=((1.0, 1.0), (2.0, 0.25)))
def allreduce(seat: Seat, op: str, factors: tuple[float, float]) -> None:
    """The gradients are reduced by the same all-reduce."""
    pre, post = factors
    x = leaf(seat, 3, 5)
    y = hvd.allreduce(x, op=FOLDS[op], prescale_factor=pre, postscale_factor=post)
    assert y.requires_grad
    y.backward(upstream(seat.rank, 3, 5))
    grads = all_upstream(seat, 3, 5) * pre
    folded = {"Sum": grads.sum(0), "Average": grads.mean(0), "Min": grads.amin(0), "Max": grads.amax(0)}[op]
    close(x.grad, folded * post)


@check()
def grouped_allreduce(seat: Seat) -> None:
    xs = [leaf(seat, 2 + i) for i in range(3)]
    outputs = hvd.grouped_allreduce(xs, op=hvd.Sum)
    assert len(outputs) == 3
    for i, y in enumerate(outputs):  # one output after another
        y.backward(upstream(seat.rank, 2 + i), retain_graph=True)
    for i, x in enumerate(xs):
        close(x.grad, all_upstream(seat, 2 + i).sum(0))
    some = [leaf(seat, 4), leaf(seat, 4).detach()]
    first, second = hvd.grouped_allreduce(some, op=hvd.Sum)
    (first.sum() + second.sum()).backward()
    close(some[0].grad, torch.full((4,), float(seat.size), dtype=torch.float64))


@check()
def allgather(seat: Seat) -> None:
    """Each rank gets its rows of the mean of all gradients."""
    rows = [rank + 1 for rank in range(seat.size)]
    x = leaf(seat, rows[seat.rank], 2)
    y = hvd.allgather(x)
    y.backward(upstream(seat.rank, sum(rows), 2))
    start = sum(rows[: seat.rank])
    close(x.grad, all_upstream(seat, sum(rows), 2).mean(0)[start : start + rows[seat.rank]])
    scalar = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    hvd.allgather(scalar).sum().backward()
    close(scalar.grad, torch.tensor(1.0, dtype=torch.float64))


@check(least=2)
def allgather_of_zero_rows_and_groups(seat: Seat) -> None:
    x = leaf(seat, seat.rank, 3)
    z = leaf(seat, 2)
    gathered, other = hvd.grouped_allgather([x, z])
    (gathered.sum() + 2 * other.sum()).backward()
    close(x.grad, torch.ones(seat.rank, 3, dtype=torch.float64))
    close(z.grad, torch.full((2,), 2.0, dtype=torch.float64))


@check()
def broadcast(seat: Seat) -> None:
    """The root gets the mean of all gradients, other ranks get zero."""
    for root in range(seat.size):
        x = leaf(seat, 4)
        hvd.broadcast(x, root).backward(upstream(seat.rank, 4))
        close(x.grad, all_upstream(seat, 4).mean(0) if seat.rank == root else torch.zeros(4, dtype=torch.float64))


@check()
def alltoall(seat: Seat) -> None:
    """Each gradient returns to the rank that sent the row; rows that were not sent get zero."""
    splits = [(seat.rank + target) % 3 for target in range(seat.size)]
    x = leaf(seat, sum(splits) + 2, 2)
    output, received = hvd.alltoall(x, splits=splits)
    assert not received.requires_grad
    weight = torch.cat(
        [torch.full((count, 2), 10.0 * source + seat.rank) for source, count in enumerate(received.tolist())]
    )
    (output * weight).sum().backward()
    wanted = [torch.full((count, 2), 10.0 * seat.rank + target) for target, count in enumerate(splits)]
    close(x.grad, torch.cat([*wanted, torch.zeros(2, 2)]).double())
    even = leaf(seat, seat.size * 2)
    hvd.alltoall(even).mul(3).sum().backward()
    close(even.grad, torch.full((seat.size * 2,), 3.0, dtype=torch.float64))


@check(op=("Sum", "Average"))
def reducescatter(seat: Seat, op: str) -> None:
    """The whole derivative: the gathered gradients times the scale factors, and for Sum also times the number of
    ranks."""
    rows = 2 * seat.size + 1
    x = leaf(seat, rows, 2)
    y = hvd.reducescatter(x, op=FOLDS[op], prescale_factor=0.5, postscale_factor=3.0)
    grad = upstream(seat.rank, *y.shape)
    kept = grad.clone()
    y.backward(grad)
    assert torch.equal(grad, kept)  # Horovod scales it in place
    counts = [rows // seat.size + (rank < rows % seat.size) for rank in range(seat.size)]
    wanted = torch.cat([upstream(rank, counts[rank], 2) for rank in range(seat.size)])
    close(x.grad, wanted * 1.5 * (seat.size if op == "Sum" else 1))
    many = [leaf(seat, seat.size), leaf(seat, seat.size)]
    sum(part.sum() for part in hvd.grouped_reducescatter(many, op=hvd.Sum)).backward()
    for tensor in many:
        close(tensor.grad, torch.full((seat.size,), float(seat.size), dtype=torch.float64))


@check(least=2)
def within_a_process_set(seat: Seat) -> None:
    ranks = list(range(1, seat.size))
    some = hvd.add_process_set(ranks)
    if some.included():
        x = leaf(seat, 3)
        hvd.allreduce(x, process_set=some).backward(upstream(seat.rank, 3))
        close(x.grad, torch.stack([upstream(rank, 3) for rank in ranks]).mean(0))
        x.grad = None
        hvd.allgather(x, process_set=some).sum().backward()
        close(x.grad, torch.ones(3, dtype=torch.float64))
        x.grad = None
        hvd.broadcast(x, 1, process_set=some).sum().backward()
        close(x.grad, torch.full((3,), float(seat.rank == 1), dtype=torch.float64))
    hvd.remove_process_set(some)


@check()
def through_compression(seat: Seat) -> None:
    x = leaf(seat, 5, dtype=torch.float32)
    hvd.allreduce(x, compression=hvd.Compression.fp16, op=hvd.Sum).sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32
    assert x.grad.tolist() == [seat.size] * 5


@check()
def what_does_not_require_a_gradient(seat: Seat) -> None:
    x = torch.ones(3)
    for result in (hvd.allreduce(x), hvd.allgather(x), hvd.broadcast(x, 0)):
        assert not result.requires_grad
    y = x.clone().requires_grad_()
    assert not hvd.synchronize(hvd.allreduce_async(y, name="async")).requires_grad
    with torch.no_grad():
        assert not hvd.allreduce(y).requires_grad


@check()
def in_a_small_network(seat: Seat) -> None:
    """For averaged activations, the gradient of the local weights includes this rank's share in all ranks' losses."""
    weight = leaf(seat, 3, 3)
    x = values(seat.rank, (2, 3), torch.float64, seed=5)
    y = hvd.allreduce(x @ weight)
    (y**2).sum().backward()
    # dL_r/dy = 2y on every rank. The backward of Average averages these, so dW = x^T (2y).
    close(weight.grad, x.t() @ (2 * y.detach()))


IN_PLACE = {
    "allreduce_": hvd.allreduce_,
    "again": lambda x: [hvd.allreduce_(x, name="again") for _ in range(4)],
    "allreduce_async_": lambda x: hvd.synchronize(hvd.allreduce_async_(x)),
    "grouped_allreduce_": lambda x: hvd.grouped_allreduce_([torch.ones(2), x]),
    "grouped_allreduce_async_": lambda x: hvd.synchronize(hvd.grouped_allreduce_async_([x])),
    "broadcast_": lambda x: hvd.broadcast_(x, 0),
    "broadcast_async_": lambda x: hvd.synchronize(hvd.broadcast_async_(x, 0)),
}


@check(how=IN_PLACE)
def what_a_graph_has_saved_is_not_changed_unseen(seat: Seat, how: str) -> None:
    """Backward raises if a saved tensor was changed, as after torch's own in-place operations, on every path of the
    operation."""
    for turn in range(3):
        weight, x = torch.ones(3, requires_grad=True), torch.full((3,), 2.0 + seat.rank)
        before = x._version
        loss = (weight * x).sum()
        with torch.no_grad():
            IN_PLACE[how](x)
        assert x._version - before == (4 if how == "again" else 1), (turn, x._version)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    with torch.inference_mode():
        IN_PLACE[how](torch.ones(3))


def _result(op: str, x: torch.Tensor) -> torch.Tensor:
    if op == "alltoall":
        received: torch.Tensor = hvd.alltoall(x, splits=[1] * hvd.size())[0]
        return received
    calls = {
        "allreduce": lambda: hvd.allreduce(x, op=hvd.Sum),
        "allgather": lambda: hvd.allgather(x),
        "broadcast": lambda: hvd.broadcast(x, hvd.size() - 1),
        "reducescatter": lambda: hvd.reducescatter(x, op=hvd.Sum),
    }
    return calls[op]()


@check(op=("allreduce", "allgather", "broadcast", "alltoall", "reducescatter"))
def second_derivatives(seat: Seat, op: str) -> None:
    """Second derivatives contain the part from the backward of a collective, as within torch.func.grad."""

    def first(x: torch.Tensor) -> torch.Tensor:
        return (_result(op, x) ** 3).sum()

    def penalty(x: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
        return (slope**2).sum() + (x**2).sum()

    x = leaf(seat, seat.size + 1)
    wanted = torch.func.grad(lambda x: penalty(x, torch.func.grad(first)(x)))(x.detach())
    (slope,) = torch.autograd.grad(first(x), x, create_graph=True)
    penalty(x, slope).backward()
    close(x.grad, wanted)
