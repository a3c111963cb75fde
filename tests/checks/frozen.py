"""Parameters that are not trained: no algorithm exchanges them, until they are unfrozen."""

from __future__ import annotations

import pytest
import torch
from algorithm_table import ASYNCHRONOUS, EXCHANGING, often

import sordino.torch as hvd
from checks.registry import Seat, check
from sordino.algorithms import (
    ADPSGD,
    Algorithm,
    AllReduce,
    Crossover,
    DiLoCo,
    Layered,
    LocalSGD,
    PushSum,
)
from sordino.errors import LayoutMismatch, UsageError

TOGETHER: dict[str, Algorithm] = {
    **{name: often(one) for name, one in EXCHANGING.items()},
    "crossover-groups": Crossover(group_size=2),
    "push-sum": PushSum(overlap=1),
    "local-gradients": LocalSGD(2, aggregate="gradients"),
    "local-groups": LocalSGD(2, group_size=2, exchange="allreduce"),
}
ALONE: dict[str, Algorithm] = {**ASYNCHRONOUS, "adpsgd": ADPSGD(overlap=0)}
GRADIENTS: dict[str, Algorithm] = {
    "allreduce": AllReduce(),
    "layered": Layered(group_size=1),
    "sharded": LocalSGD(1, 2),
}
LARGE = 30_000


class Adapted(torch.nn.Module):
    """Model with a large frozen weight, which differs between ranks here, and a small trained weight."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.base = torch.nn.Parameter(torch.full((LARGE,), float(rank)), requires_grad=False)
        self.adapter = torch.nn.Parameter(torch.full((3,), float(rank)))

    def forward(self) -> torch.Tensor:
        return self.base.sum() + self.adapter.sum()


def wrap(model: torch.nn.Module, algorithm: Algorithm, lr: float = 0.0) -> hvd.DistributedOptimizer:
    sgd = torch.optim.SGD(model.parameters(), lr=lr)
    return hvd.DistributedOptimizer(sgd, model.named_parameters(), algorithm=algorithm)


def step(model: torch.nn.Module, optimizer: hvd.DistributedOptimizer, gradient: float = 1.0) -> None:
    optimizer.zero_grad()
    (gradient * model()).backward()
    optimizer.step()


def unfreeze(seat: Seat, model: Adapted, optimizer: hvd.DistributedOptimizer, after: int, steps: int) -> None:
    """Take steps; the base is frozen in the first ones and trained in the others. All gradients equal the rank."""
    for turn in range(steps):
        model.base.requires_grad_(turn >= after)
        step(model, optimizer, seat.rank)
    optimizer.flush()


def fits(algorithm: Algorithm, size: int) -> bool:
    members = algorithm.workers_in_group
    return size % members == 0 and (size > members or algorithm in GRADIENTS.values())


@check(least=2, kind=tuple(TOGETHER | ALONE))
def frozen_parameters_are_not_sent(seat: Seat, kind: str) -> None:
    algorithm = (TOGETHER | ALONE)[kind]
    if not fits(algorithm, seat.size):
        return
    model = Adapted(seat.rank)
    optimizer = wrap(model, algorithm)
    before = hvd.stats()["bytes_sent"]
    for _ in range(4):
        step(model, optimizer)
    optimizer.flush()
    assert bool((model.base == seat.rank).all()), "frozen parameters were exchanged"
    assert hvd.stats()["bytes_sent"] - before < LARGE, "frozen parameters were sent"
    if kind in TOGETHER and kind != "local-gradients":  # adds up movements, and nothing moves here
        assert hvd.allreduce(model.adapter.detach(), op=hvd.Max)[0] < seat.size - 1, "what is trained is mixed"
    hvd.barrier()


@check(least=2, kind=tuple(TOGETHER))
def unfrozen_parameters_are_exchanged_from_then_on(seat: Seat, kind: str) -> None:
    algorithm = TOGETHER[kind]
    if not fits(algorithm, seat.size):
        return
    model = Adapted(seat.rank)
    optimizer = wrap(model, algorithm)
    for _ in range(3):
        step(model, optimizer)
    steps = optimizer.state_dict()["sordino"]["steps"]
    model.base.requires_grad_(True)
    for _ in range(8):
        step(model, optimizer)
    optimizer.flush()
    assert optimizer.state_dict()["sordino"]["steps"] == steps + 8
    values = hvd.allgather(model.base.detach()[:1]).tolist()
    if kind == "local-gradients":  # adds up movements
        assert values == list(range(seat.size))
    else:
        assert max(values) - min(values) < seat.size - 1, values
    if kind in ("crossover", "dpsgd", "push-sum", "local-sgd", "caps"):
        assert sum(values) == pytest.approx(sum(range(seat.size)), rel=1e-5)


@check(least=2, kind=("local-sgd", "local-gradients", "diloco"))
def steps_before_parameters_are_unfrozen_are_averaged(seat: Seat, kind: str) -> None:
    """Parameters are unfrozen between two averages, when each rank has moved on its own. Steps before that are also
    averaged."""
    model = Adapted(0)
    optimizer = wrap(model, TOGETHER[kind], lr=0.25)
    unfreeze(seat, model, optimizer, after=3, steps=6)
    moved = sum(range(seat.size)) / (1 if kind == "local-gradients" else seat.size)  # movements add up, models average
    for value, steps in ((model.adapter, 6), (model.base, 3)):
        torch.testing.assert_close(value, torch.full_like(value, -0.25 * steps * moved))


FREEZING = {**TOGETHER, "sharded": LocalSGD(2, 2), "diloco": DiLoCo(4, outer_lr=0.7, outer_momentum=0.5)}


@check(least=2, kind=tuple(FREEZING | ALONE), how=("unfrozen", "added"))
def parameters_frozen_when_others_come(seat: Seat, kind: str, how: str) -> None:
    """Parameters are frozen between two exchanges. They become the mean over all ranks, because no later exchange has
    them."""
    algorithm = (FREEZING | ALONE)[kind]
    if not fits(algorithm, seat.size) or (kind in ALONE and how == "unfrozen"):
        return
    first, late = torch.nn.Parameter(torch.zeros(300)), torch.nn.Parameter(torch.zeros(5), requires_grad=False)
    sgd = torch.optim.SGD([first] if how == "added" else [first, late], lr=1.0)
    optimizer = hvd.DistributedOptimizer(sgd, algorithm=algorithm)
    for _ in range(3):
        first.grad = torch.full_like(first, float(seat.rank))
        optimizer.step()
    first.requires_grad_(False)
    first.grad = None
    late.requires_grad_(True)
    if how == "added":
        optimizer.add_param_group({"params": [late]})
    for _ in range(8):
        late.grad = torch.full_like(late, float(seat.rank))
        optimizer.step()
    optimizer.flush()
    seat.same("frozen", first)
    if kind in ("crossover", "dpsgd", "push-sum", "local-sgd", "sharded", "caps"):
        torch.testing.assert_close(first, torch.full_like(first, -3.0 * (seat.size - 1) / 2))


@check(least=2, kind=tuple(GRADIENTS))
def gradients_of_unfrozen_parameters_are_averaged(seat: Seat, kind: str) -> None:
    if not fits(GRADIENTS[kind], seat.size):
        return
    model = Adapted(0)
    optimizer = wrap(model, GRADIENTS[kind], lr=0.1)
    unfreeze(seat, model, optimizer, after=2, steps=5)
    seat.same("base", model.base)
    assert float(model.base[0]) < 0


@check(least=2, kind=tuple(ALONE))
def ranks_that_are_not_in_step_refuse_to_unfreeze(seat: Seat, kind: str) -> None:
    model = Adapted(seat.rank)
    optimizer = wrap(model, ALONE[kind])
    step(model, optimizer)
    hvd.barrier()
    model.base.requires_grad_(True)
    optimizer.zero_grad()
    model().backward()
    with pytest.raises(UsageError, match="'base' was frozen at the first step"):
        optimizer.step()
    hvd.barrier()


@check(least=2, kind=("diloco", "noloco", "elastic-averaging"))
def a_state_of_other_parameters_does_not_move_these(seat: Seat, kind: str) -> None:
    """Two layers of equal size are trained one after the other, the second from the state of the first."""
    layers = torch.nn.ParameterList([torch.zeros(3), torch.full((3,), 100.0)])
    state = None
    for trained in (0, 1):
        for number, layer in enumerate(layers):
            layer.requires_grad_(number == trained)
        optimizer = wrap(layers, TOGETHER[kind])
        if state is not None:
            optimizer.load_state_dict(state)
        for _ in range(4):
            optimizer.zero_grad()
            layers[trained].sum().backward()
            optimizer.step()
        optimizer.flush()
        state = optimizer.state_dict()
        optimizer = None
    assert torch.equal(layers[0], torch.zeros(3))
    assert torch.equal(layers[1], torch.full((3,), 100.0))


@check(least=2, kind=("diloco", "elastic-averaging"))
def a_state_of_the_same_parameters_with_other_names_is_used(seat: Seat, kind: str) -> None:
    layers = torch.nn.ParameterDict({"a": torch.full((3,), float(seat.rank)), "b": torch.ones(2)})
    state = None
    for form in ("module.{}", "{}", None, "module._orig_mod.{}"):
        named = [(form.format(name), one) for name, one in layers.named_parameters()] if form else None
        sgd = torch.optim.SGD(layers.parameters(), lr=0.5)
        optimizer = hvd.DistributedOptimizer(sgd, named, algorithm=TOGETHER[kind])
        if state is not None:
            optimizer.load_state_dict(state)
        kept = optimizer.state_dict()["sordino"].get("outer" if kind == "diloco" else "centre")
        assert (kept is None) == (state is None)
        optimizer.zero_grad()
        (layers["a"].sum() + layers["b"].sum()).backward()
        optimizer.step()
        state = optimizer.state_dict()
        optimizer = None


@check(least=2, kind=("crossover", "local-sgd", "caps"))
def ranks_that_freeze_differently_are_told(seat: Seat, kind: str) -> None:
    model = Adapted(seat.rank)
    model.base.requires_grad_(seat.rank == 0)
    with pytest.raises(LayoutMismatch, match=r"'base float32 \[30000\]' on rank 0, 'base float32 \[30000\] frozen' on"):
        wrap(model, TOGETHER[kind])


@check(least=2, kind=("crossover", "local-sgd", "caps", "elastic-averaging"))
def all_parameters_are_frozen_at_first(seat: Seat, kind: str) -> None:
    model = Adapted(seat.rank)
    model.adapter.requires_grad_(False)
    optimizer = wrap(model, TOGETHER[kind])
    optimizer.step()
    model.adapter.requires_grad_(True)
    for _ in range(4):
        step(model, optimizer)
    optimizer.flush()
    assert bool((model.base == seat.rank).all())
    assert hvd.allreduce(model.adapter.detach(), op=hvd.Max)[0] < seat.size - 1
