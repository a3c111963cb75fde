"""Hierarchical local SGD whose optimizer is saved, loaded or changed in the middle of a training."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

import sordino.torch as hvd
from checks.odd import OPTIMIZERS, Odd, batch, divisors, same_models, step, twin_of, wrap
from checks.registry import Seat, check
from sordino.algorithms import LocalSGD
from sordino.errors import NonFinite


@check(least=2, exchange=("sharded", "allreduce"))
def a_restart_switches_at_the_same_step(seat: Seat, exchange: str) -> None:
    k = divisors(seat.size)[-2]
    algorithm = LocalSGD(2, k, exchange, start=4)
    model = Odd()
    optimizer = wrap(model, algorithm, OPTIMIZERS["sgd"])
    for turn in range(3):
        step(seat, model, optimizer, turn)
    state = optimizer.state_dict()
    twin = Odd()
    twin.load_state_dict(model.state_dict())
    resumed = wrap(twin, algorithm, OPTIMIZERS["sgd"])
    resumed.load_state_dict(state)
    for turn in range(3, 9):
        step(seat, model, optimizer, turn)
        step(seat, twin, resumed, turn)
        for mine, theirs in zip(model.parameters(), twin.parameters()):
            assert torch.equal(mine, theirs)
    assert optimizer.state_dict()["sordino"]["alone"]


@check(least=2, exchange=("sharded", "allreduce"), start=("immediate", 0))
def groups_begin_at_a_restart(seat: Seat, exchange: str, start: Any) -> None:
    """The state is from a training with a later `start`, in which groups were still together."""
    k = divisors(seat.size)[-2]
    model = Odd()
    optimizer = wrap(model, LocalSGD(3, k, exchange, start=100), OPTIMIZERS["momentum"])
    for turn in range(4):
        step(seat, model, optimizer, turn)
    twin, resumed = twin_of(model, optimizer, LocalSGD(3, k, exchange, start), OPTIMIZERS["momentum"])
    for turn in range(4, 10):
        step(seat, twin, resumed, turn)
        assert (hvd.consensus_distance(twin) < 1e-5) == (turn in (6, 9))


@check(least=2, exchange=("sharded", "allreduce"))
def a_restart_goes_on_within_the_interval(seat: Seat, exchange: str) -> None:
    algorithm, make = LocalSGD(3, divisors(seat.size)[-2], exchange), OPTIMIZERS["momentum"]
    model = Odd()
    optimizer = wrap(model, algorithm, make)
    for turn in range(4):
        step(seat, model, optimizer, turn)
    twin, resumed = twin_of(model, optimizer, algorithm, make)
    for turn in range(4, 10):
        step(seat, model, optimizer, turn)
        step(seat, twin, resumed, turn)
        assert same_models(model, twin)
        assert (hvd.consensus_distance(model) < 1e-5) == ((turn + 1) % 3 == 0)


@check(least=2, exchange=("sharded", "allreduce"), start=("immediate", 2), quick=("sim-4", "sim-4x2"))
def sums_of_movements_go_on_within_the_interval(seat: Seat, exchange: str, start: Any) -> None:
    """Training is the same, bit for bit, from a state of any step, in another optimizer and in the one that has saved
    it. Groups that have begun the interval with equal models end it with equal ones."""
    algorithm = LocalSGD(3, divisors(seat.size)[-2], exchange, start, "gradients")

    def make(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.5)

    model = Odd()
    optimizer = wrap(model, algorithm, make)
    saved, last = [], 8
    for turn in range(last):
        saved.append(copy.deepcopy((model.state_dict(), optimizer.state_dict())))
        step(seat, model, optimizer, turn)
    wanted = [parameter.detach().clone() for parameter in model.parameters()]
    for begin in range(1, last):
        twin = Odd()
        resumed = wrap(twin, algorithm, make)
        if begin == last - 1:
            twin, resumed = model, optimizer
        twin.load_state_dict(saved[begin][0])
        resumed.load_state_dict(saved[begin][1])
        for turn in range(begin, last):
            step(seat, twin, resumed, turn)
        assert all(map(torch.equal, wanted, twin.parameters())), begin
    models, state = saved[3 if start == "immediate" else 5]  # after an averaging
    assert all(torch.equal(models[name], value) for name, value in state["sordino"]["outer"].items())
    assert state["sordino"]["outer"].keys() == models.keys()
    if start == 2:
        assert hvd.consensus_distance(model) < 1e-5  # after two intervals


@check(least=2, exchange=("sharded", "allreduce"))
def a_state_takes_groups_together_and_apart(seat: Seat, exchange: str) -> None:
    """Loading a state sets whether groups train together or on their own, whatever the loading optimizer did before."""
    algorithm, make = LocalSGD(4, divisors(seat.size)[-2], exchange, start=2), OPTIMIZERS["sgd"]
    model = Odd()
    optimizer = wrap(model, algorithm, make)
    step(seat, model, optimizer, 0)
    together = optimizer.state_dict()
    for turn in range(1, 4):
        step(seat, model, optimizer, turn)
    assert hvd.consensus_distance(model) > 1e-5
    twin, resumed = twin_of(model, optimizer, algorithm, make)
    for turn in range(4, 8):
        step(seat, model, optimizer, turn)
        step(seat, twin, resumed, turn)
        assert same_models(model, twin)
    fresh = Odd()
    for mine, theirs in zip(model.parameters(), fresh.parameters()):
        mine.data.copy_(theirs.data)
    optimizer.load_state_dict(together)
    apart = []
    for turn in range(4):
        step(seat, model, optimizer, turn)
        apart.append(hvd.consensus_distance(model) > 1e-5)
    assert apart == [False, True, True, True]


@check(least=2, exchange=("sharded", "allreduce"))
def movements_begin_where_a_state_is_loaded(seat: Seat, exchange: str) -> None:
    algorithm = LocalSGD(2, divisors(seat.size)[-2], exchange, aggregate="gradients")

    def make(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.02)

    model = Odd()
    optimizer = wrap(model, algorithm, make)
    step(seat, model, optimizer, 0)
    step(seat, model, optimizer, 1)
    state = optimizer.state_dict()
    step(seat, model, optimizer, 2)
    for parameter in model.parameters():
        parameter.data.mul_(0.5)
    optimizer.load_state_dict(state)
    twin = Odd()
    twin.load_state_dict(model.state_dict())
    resumed = wrap(twin, algorithm, make)
    resumed.load_state_dict(state)
    for turn in range(3, 7):
        step(seat, model, optimizer, turn)
        step(seat, twin, resumed, turn)
        assert same_models(model, twin)


@check(least=2)
def a_rate_that_has_fallen_before_a_restart_counts(seat: Seat) -> None:
    algorithm = LocalSGD(3, start="decay")
    model = Odd()
    optimizer = wrap(model, algorithm, OPTIMIZERS["sgd"])
    step(seat, model, optimizer, 0)
    model, optimizer = twin_of(model, optimizer, algorithm, OPTIMIZERS["sgd"])
    optimizer.param_groups[0]["lr"] = 0.01
    step(seat, model, optimizer, 1)
    assert optimizer.state_dict()["sordino"]["alone"]
    step(seat, model, optimizer, 2)
    assert hvd.consensus_distance(model) > 1e-6


@check(least=2)
def a_state_from_before_is_read_and_replaced_at_once(seat: Seat) -> None:
    model = Odd()
    plain = OPTIMIZERS["momentum"](list(model.parameters()))
    inputs, targets = batch(0, 0)
    torch.nn.functional.mse_loss(model(inputs), targets).backward()
    plain.step()
    before = copy.deepcopy(plain.state_dict())
    other = copy.deepcopy(before)
    for values in other["state"].values():
        values["momentum_buffer"].mul_(3)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), algorithm=LocalSGD(2, seat.size))
    for wanted in (before, other):
        if wanted is other:
            del optimizer  # with the interval that it found
            plain = OPTIMIZERS["momentum"](list(model.parameters()))
            plain.load_state_dict(copy.deepcopy(before))
            optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), algorithm=LocalSGD(2, seat.size))
            optimizer.load_state_dict(copy.deepcopy(other))
        found = optimizer.state_dict()["state"]
        assert found.keys() == wanted["state"].keys()
        for index, values in wanted["state"].items():
            assert torch.equal(found[index]["momentum_buffer"], values["momentum_buffer"])


@check(least=2, exchange=("sharded", "allreduce"))
def sums_of_movements_survive_changes(seat: Seat, exchange: str) -> None:
    k = divisors(seat.size)[-2]
    model = Odd()
    model.image.requires_grad_(False)
    algorithm = LocalSGD(2, k, exchange, aggregate="gradients")
    optimizer = wrap(model, algorithm, lambda p: torch.optim.SGD(p, lr=0.001))
    for turn in range(3):
        step(seat, model, optimizer, turn)
    model.image.requires_grad_(True)
    step(seat, model, optimizer, 3)
    assert hvd.consensus_distance(model) < 1e-5
    before = model.image.detach().clone()
    step(seat, model, optimizer, 4)
    optimizer.set_backward_passes_per_step(1)
    assert hvd.consensus_distance(model) < 1e-5
    assert float((model.image.detach() - before).abs().max()) < 0.1


@check(least=2, exchange=("sharded", "allreduce"))
def what_groups_have_moved_is_added_up_before_changes(seat: Seat, exchange: str) -> None:
    k = divisors(seat.size)[-2]
    model = Odd()
    buffer = torch.full((3,), float(seat.rank))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01),
        model.named_parameters(),
        algorithm=LocalSGD(3, k, exchange, aggregate="gradients", buffers="average"),
        named_buffers=[("buffer", buffer)],
    )
    then = [parameter.detach().clone() for parameter in model.parameters()]
    for turn in range(2):
        step(seat, model, optimizer, turn)
    wanted = [
        start + hvd.allreduce(parameter.detach() - start, op=hvd.Sum) / k
        for parameter, start in zip(model.parameters(), then)
    ]
    optimizer.set_backward_passes_per_step(1)
    for parameter, value in zip(model.parameters(), wanted):
        torch.testing.assert_close(parameter.detach(), value, atol=1e-6, rtol=1e-5)
    seat.same("parameters", *(parameter.detach() for parameter in model.parameters()))
    torch.testing.assert_close(buffer, torch.full((3,), (seat.size - 1) / 2))


@check(least=2)
def what_is_not_finite_is_not_added_up_before_changes(seat: Seat) -> None:
    model = Odd()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01),
        model.named_parameters(),
        algorithm=LocalSGD(3, divisors(seat.size)[-2], "allreduce", aggregate="gradients"),
        check_finite=True,
    )
    step(seat, model, optimizer, 0)
    if seat.rank == 0:
        model.bias.data.fill_(math.nan)
    with pytest.raises(NonFinite):
        optimizer.set_backward_passes_per_step(1)


@check(least=2, exchange=("sharded", "allreduce"))
def a_change_keeps_state_and_interval(seat: Seat, exchange: str) -> None:
    algorithm, make = LocalSGD(4, divisors(seat.size)[-2], exchange), OPTIMIZERS["momentum"]
    plain, changed = Odd(), Odd()
    optimizers = [wrap(model, algorithm, make) for model in (plain, changed)]
    for turn in range(9):
        if turn == 6:
            optimizers[1].set_backward_passes_per_step(1)
        for model, optimizer in zip((plain, changed), optimizers):
            step(seat, model, optimizer, turn)
        assert same_models(plain, changed)


@check(least=2)
def another_interval_counts_after_a_restart(seat: Seat) -> None:
    """An interval in a state replaces the interval of the optimizer only if it is adaptive."""
    model = Odd()
    optimizer = wrap(model, LocalSGD(2), OPTIMIZERS["sgd"])
    for turn in range(2):
        step(seat, model, optimizer, turn)
    model, optimizer = twin_of(model, optimizer, LocalSGD(3), OPTIMIZERS["sgd"])
    together = []
    for turn in range(2, 8):
        step(seat, model, optimizer, turn)
        together.append(hvd.consensus_distance(model) < 1e-5)
    assert together == [False, False, True] * 2


@check(least=2)
def distances_stay_when_parameters_change(seat: Seat) -> None:
    model = Odd()
    model.image.requires_grad_(False)
    optimizer = wrap(model, LocalSGD(3, log_distance=1), OPTIMIZERS["sgd"])
    for turn in range(2):
        step(seat, model, optimizer, turn)
    first = list(optimizer.distances)
    model.image.requires_grad_(True)
    step(seat, model, optimizer, 2)
    optimizer.set_backward_passes_per_step(1)
    step(seat, model, optimizer, 3)
    assert [number for number, _ in optimizer.distances] == [1, 2, 3, 4] and optimizer.distances[:2] == first


@check(least=2, quick=("sim-4", "sim-4x2"))
def a_rank_that_joins_separate_groups_is_in_one(seat: Seat) -> None:
    """The new rank knows that groups train separately before it receives the state of its group."""
    k = divisors(seat.size)[-2]
    model = Odd()
    optimizer = wrap(model, LocalSGD(2, k, "allreduce", start=2), OPTIMIZERS["sgd"])
    first = optimizer._strategy.state_dict()
    for turn in range(3):
        step(seat, model, optimizer, turn)
    if seat.rank == seat.last:
        optimizer._strategy.load_state_dict(first)
    optimizer._wrapping.after_growth()
    group = optimizer._strategy.ranks_of_model()
    begin = seat.rank // k * k
    assert (None if group is None else group.ranks) == (None if k == 1 else list(range(begin, begin + k)))
