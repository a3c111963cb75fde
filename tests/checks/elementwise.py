"""Sharded local SGD with optimizers of the user: element-wise ones train as without shards, and others raise."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import sordino.torch as hvd
from checks.odd import Make, Odd, batch, divisors, near, same_models, step, train, wrap
from checks.registry import Seat, check
from sordino.algorithms import LocalSGD
from sordino.errors import ConfigurationMismatch, UsageError


class Derived(torch.optim.SGD):
    """Same as its base class, with an attribute that is not pickled."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return super().step(closure)


class Own(torch.optim.Optimizer):
    """Tanh of a moving average, element by element. The kinds norm, shape, scalar and noise only look so."""

    def __init__(self, params: Any, lr: float, kind: str = "elements") -> None:
        super().__init__(params, {"lr": lr})
        self.kind = kind

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if self.kind == "counts":
            self.state["count"] = self.state.get("count", 0) + 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if self.kind == "nested":
                    average, _ = state.setdefault("averages", {0.9: [torch.zeros_like(p), 0.9]})[0.9]
                else:
                    average = state.setdefault("average", torch.zeros_like(p))
                average.mul_(0.9).add_(p.grad)
                change = torch.tanh(average)
                if self.kind == "counts":
                    change = change / self.state["count"]
                if self.kind == "norm":
                    change = change / average.norm()
                elif self.kind == "shape" and p.dim() > 1:
                    change = change + 0.1 * p
                elif self.kind == "scalar" and p.dim() == 0:  # one rank has its only slice
                    change = 2 * change
                elif self.kind == "noise":
                    change = change + 1e-3 * torch.randn_like(p)
                p.sub_(group["lr"] * change)


for _kind in (Derived, Own, torch.optim.SGD):  # torch changes a class at its first object, which is not thread-safe
    _kind([torch.nn.Parameter(torch.zeros(1))], lr=0.0)


@check(least=2, make=("derived", "own"))
def an_optimizer_of_ones_own_is_sharded_if_one_says_so(seat: Seat, make: str) -> None:
    kinds: dict[str, Make] = {
        "derived": lambda p: Derived(p, lr=0.05, momentum=0.9),
        "own": lambda p: Own(p, lr=0.05),
    }
    for k in divisors(seat.size)[1:]:
        algorithm = LocalSGD(2, k, bucket_bytes=200, elementwise=True)
        near(train(seat, algorithm, 5, kinds[make]), train(seat, LocalSGD(2, k, "allreduce"), 5, kinds[make]))
    model = Odd()
    with pytest.raises(UsageError, match=r"slices of parameters.* give elementwise=True"):
        wrap(model, LocalSGD(2, seat.size), kinds[make])
    optimizer = wrap(model, algorithm, kinds[make])
    state = torch.get_rng_state()
    for turn in range(3):
        step(seat, model, optimizer, turn)
    assert torch.equal(torch.get_rng_state(), state)
    if make == "derived":
        assert optimizer.steps == 3  # steps on copies do not count


def resumes(seat: Seat, exchange: str, kind: str) -> hvd.DistributedOptimizer:
    """Check that training resumes from a state after 3 steps. Return the optimizer that has resumed."""

    def wrapped(model: torch.nn.Module) -> hvd.DistributedOptimizer:
        algorithm = LocalSGD(1, seat.size, exchange, elementwise=exchange == "sharded")
        return wrap(model, algorithm, lambda p: Own(p, lr=0.05, kind=kind))

    model, other = Odd(), Odd()
    optimizer, resumed = wrapped(model), wrapped(other)
    for turn in range(3):
        step(seat, model, optimizer, turn)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, trained in ((model, optimizer), (other, resumed)):
        step(seat, one, trained, 3)
    near(other, model)
    return resumed


@check(least=2, exchange=("sharded", "allreduce"))
def tensors_in_containers_are_in_the_state(seat: Seat, exchange: str) -> None:
    """State of an optimizer with several momenta, such as AggMo."""
    resumed = resumes(seat, exchange, "nested")
    for number, parameter in enumerate(resumed.param_groups[0]["params"]):
        entry = resumed.state_dict()["state"].get(number)
        assert entry is None or entry["averages"][0.9][0].shape == parameter.shape


@check(least=2, exchange=("sharded", "allreduce"))
def entries_of_no_parameter_are_in_the_state(seat: Seat, exchange: str) -> None:
    """State of an optimizer that counts its steps."""
    resumed = resumes(seat, exchange, "counts")
    assert resumed.state_dict()["state"]["count"] == 4
    if seat.rank > 0:
        resumed.state["count"] = 9
    hvd.broadcast_optimizer_state(resumed, 0)
    assert resumed.state_dict()["state"]["count"] == 4


@check(least=2, kind=("norm", "shape", "scalar", "noise"))
def who_says_so_wrongly_is_told(seat: Seat, kind: str) -> None:
    """A wrong claim to be element-wise raises on all ranks, before anything is changed. This also holds if the first
    steps change nothing."""
    torch.manual_seed(3)
    model = Odd()
    before = copy.deepcopy(model)
    optimizer = wrap(model, LocalSGD(2, seat.size, elementwise=True), lambda p: Own(p, 0.0, kind))
    for turn in range(2):
        step(seat, model, optimizer, turn)
    assert same_models(model, before)
    optimizer.param_groups[0]["lr"] = 0.01
    with pytest.raises(UsageError, match=r"Own is not element-wise. On rank.*: .+\. Nothing was changed") as caught:
        step(seat, model, optimizer, 2)
    seat.same("message", str(caught.value))
    assert same_models(model, before)


@check(least=2)
def a_claim_is_tried_with_a_state_hooks_and_a_scaler(seat: Seat) -> None:
    """A trial of the claim starts both copies from the existing state and leaves nothing behind."""
    results, counts = [], []
    for exchange in ("sharded", "allreduce"):
        model = Odd()
        plain = Derived(list(model.parameters()), lr=0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(plain, 2)  # this replaces the optimizer's step() by its own
        torch.nn.functional.mse_loss(model(batch(0, 0)[0]), batch(0, 0)[1]).backward()
        plain.step()
        algorithm = LocalSGD(2, divisors(seat.size)[-1], exchange, elementwise=exchange == "sharded")
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), algorithm=algorithm, check_finite=True)
        calls: list[int] = []
        optimizer.register_step_pre_hook(lambda *_: calls.append(1))  # noqa: B023
        for turn in range(4):
            step(seat, model, optimizer, turn)
            schedule.step()
        results.append(model)
        counts.append((len(calls), plain.steps))
    near(*results)
    assert counts == [(8, 5)] * 2  # torch calls hooks for a derived step() and for that of its base


@check(least=2)
def claims_are_compared(seat: Seat) -> None:
    algorithm = LocalSGD(2, seat.size, elementwise=seat.rank == 0)
    with pytest.raises(ConfigurationMismatch, match=r"rank 0 has LocalSGD\(elementwise=True\)"):
        wrap(Odd(), algorithm)
    with pytest.raises(UsageError, match=r"elementwise.*only with exchange='sharded'"):
        LocalSGD(exchange="allreduce", elementwise=True)
    with pytest.raises(UsageError, match=r"elementwise.*True or False"):
        LocalSGD(elementwise="yes")


@check(least=2)
def an_optimizer_that_refuses_slices_is_told_by_all(seat: Seat) -> None:
    """All ranks raise if the optimizer refuses slices, as torch.optim.Muon does, which takes only matrices."""

    class Matrices(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: object = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.dim() != 2:
                        raise ValueError(f"expects matrices, not {parameter.dim()} dimensions")
            super().step(closure)

    model = torch.nn.Linear(13, 7, bias=False)
    before = model.weight.detach().clone()
    algorithm = LocalSGD(2, seat.size, elementwise=True)
    plain = Matrices(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), algorithm=algorithm)
    model(torch.ones(2, 13)).sum().backward()
    with pytest.raises(UsageError, match=r"Matrices is not element-wise.*weight \(ValueError: expects matrices, not 1"):
        optimizer.step()
    assert torch.equal(model.weight, before)
