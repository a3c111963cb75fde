"""Tensors with unusual memory: values that are negated when read, and elements without memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.testing._internal.two_tensor import TwoTensor

import sordino.torch as hvd
from checks.agreement import raises
from checks.registry import Seat, check
from sordino.errors import UsageError

NEGATED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a view": lambda values: torch._neg_view(-values),
    "an imaginary part": lambda values: torch.complex(values, -values).conj().imag,
}
WITHOUT: dict[str, Callable[[], torch.Tensor]] = {
    "a zero tensor": lambda: torch._efficientzerotensor((4,)),
    "a subclass": lambda: TwoTensor(torch.ones(4), torch.ones(4)),
    "freed memory": lambda: freed(torch.ones(4)),
    "a functional tensor": lambda: torch._to_functional_tensor(torch.ones(4)),
    "a jagged tensor": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(3)], layout=torch.jagged),
    "compressed rows": lambda: torch.eye(2).to_sparse_csr(),
}


def freed(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


def expected(seat: Seat) -> torch.Tensor:
    return torch.arange(seat.size * 2.0) * sum(range(1, seat.size + 1))


@check(least=2, quick=("sim-2", "sim-3"), kind=tuple(NEGATED))
def negated_values_are_sent_as_they_read(seat: Seat, kind: str) -> None:
    made, total = NEGATED[kind], expected(seat)
    own = torch.arange(seat.size * 2.0) * (seat.rank + 1)
    rows = slice(2 * seat.rank, 2 * seat.rank + 2)
    for _ in range(3):  # repeated operations take another path
        given = made(own)
        assert given.is_neg()
        assert torch.equal(hvd.allreduce(given, op=hvd.Sum, name="a"), total)
        assert torch.equal(given, own)
        changed = made(own)
        assert torch.equal(hvd.allreduce_(changed, op=hvd.Sum, name="b"), total) and torch.equal(changed, total)
        changed, other = made(own), own.clone()
        hvd.grouped_allreduce_([changed, other], op=hvd.Sum, name="g")
        assert torch.equal(changed, total) and torch.equal(other, total)
        assert torch.equal(hvd.broadcast(given, seat.last), own / (seat.rank + 1) * seat.size)
        changed = made(own)
        hvd.broadcast_(changed, seat.last)
        assert torch.equal(changed, own / (seat.rank + 1) * seat.size)
        assert torch.equal(hvd.allgather(given)[rows.start * seat.size :][: 2 * seat.size], own)
        assert torch.equal(hvd.reducescatter(given, op=hvd.Sum), total[rows])
        columns = torch.arange(seat.size * 2.0)[rows]
        received = hvd.alltoall(given).view(seat.size, 2)
        assert torch.equal(received, torch.outer(torch.arange(1.0, seat.size + 1), columns))


@check(least=2, quick=("sim-2", "sim-3"), kind=tuple(WITHOUT))
def elements_without_memory_are_refused(seat: Seat, kind: str) -> None:
    """The call raises on this rank alone, before anything is sent. The world stays usable."""
    for call in (hvd.allreduce, hvd.allreduce_, hvd.allgather, hvd.alltoall, hvd.reducescatter):
        raises(UsageError, "tensor", call, WITHOUT[kind]())
    for call in (hvd.broadcast, hvd.broadcast_):
        raises(UsageError, "tensor", call, WITHOUT[kind](), 0)
    for _ in range(3):
        assert hvd.allreduce(torch.ones(4), op=hvd.Sum, name="x").tolist() == [seat.size] * 4
    raises(UsageError, "tensor", hvd.allreduce, WITHOUT[kind](), op=hvd.Sum, name="x")


@check()
def a_parameter_without_memory_is_refused_when_it_is_wrapped(seat: Seat) -> None:
    model = torch.nn.Linear(2, 2)
    model.weight = torch.nn.Parameter(TwoTensor(torch.ones(2, 2), torch.ones(2, 2)))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    raises(UsageError, "parameter 'weight'", hvd.DistributedOptimizer, sgd, model.named_parameters())


@check(kept=(False, True))
def a_negated_gradient_is_averaged_as_it_reads(seat: Seat, kept: bool) -> None:
    """Such a gradient occurs for a real parameter that becomes the imaginary part of a conjugated number."""
    phase = torch.nn.Parameter(torch.ones(()))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([phase], lr=0.0), [("phase", phase)])
    for _ in range(4):
        optimizer.zero_grad(set_to_none=not kept)
        number = torch.complex(torch.ones(()), phase)
        (number.conj() * torch.tensor(complex(0, seat.rank + 1))).real.backward()
        assert phase.grad is not None
        assert phase.grad.item() == sum(range(1, seat.size + 1)) / seat.size
        optimizer.step()
