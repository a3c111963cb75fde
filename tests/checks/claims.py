"""Each parameter has one wrapper, and only that wrapper steps it: second wrappers, DDP, bare optimizers, changed
parameters."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import sordino.torch as hvd
from checks.agreement import raises
from checks.models import batch, loss_of, make_model
from checks.registry import Seat, check
from checks.training import ROWS, Twins, sgd
from sordino.algorithms import AllReduce, CaPS, Crossover, Layered, LocalSGD
from sordino.errors import LayoutMismatch, OperationMismatch, StepOrderError, UsageError


@check()
def wrapped_twice(seat: Seat) -> None:
    """A second wrapper raises, as when a notebook cell runs twice. The error names both places; the first wrapper still
    trains."""
    twins = Twins(seat)
    twins.train(1)
    with pytest.raises(UsageError, match=r"'0.weight' .*training\.py:\d+.* still alive.*claims\.py:\d+.*Delete"):
        hvd.DistributedOptimizer(sgd(twins.model), twins.model.named_parameters())
    raises(UsageError, "still alive", hvd.DistributedOptimizer, twins.optimizer)
    twins.train(2)
    twins.check()
    twins.plain = sgd(twins.model)
    twins.reference = sgd(twins.twin)
    twins.optimizer = None
    twins.optimizer = hvd.DistributedOptimizer(twins.plain)
    twins.train(2)
    twins.check()


@check()
def a_constructor_that_fails_claims_nothing(seat: Seat) -> None:
    """The exception keeps the incomplete wrapper alive, as a notebook keeps the last traceback."""
    model = make_model("small", 3)
    with pytest.raises(UsageError, match="half") as kept:
        hvd.DistributedOptimizer(sgd(model), compression=hvd.Compression.fp16, algorithm=_refusing("half a wrapper"))
    hvd.DistributedOptimizer(sgd(model))
    assert kept.value.__traceback__ is not None


def _refusing(why: str) -> AllReduce:
    class Refusing(AllReduce):
        def strategy(self, runtime: object) -> None:  # type: ignore[override]
            raise UsageError(why)

    return Refusing()


def hooks_of(parameter: torch.Tensor) -> tuple[int, int]:
    """Return the number of hooks of the tensor, and of its AccumulateGrad node."""
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    probe = node.register_hook(lambda *_: None)
    of_node = len(probe.hooks_dict_ref()) - 1
    probe.remove()
    return len(parameter._post_accumulate_grad_hooks or ()), of_node


@check(least=2)
def dropped_wrappers_leave_nothing(seat: Seat) -> None:
    model = make_model("small", 3)
    node = torch.autograd.graph.get_gradient_edge(model[0].weight).node
    for turn in range(10):
        optimizer = None
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
        if turn % 2:
            optimizer.zero_grad()
            loss_of(model, *batch(ROWS, seat.rank)).backward()
            optimizer.step()
        assert all(hooks_of(parameter) == (1, 1) for parameter in model.parameters())
    del optimizer
    gc.collect()
    assert all(hooks_of(parameter) == (0, 0) for parameter in model.parameters())
    del node
    sgd(model).step()


@check()
def several_wrappers_of_different_parameters(seat: Seat) -> None:
    twins = Twins(seat)
    other = Twins(seat)
    for one in (twins, other):
        one.train(2)
        one.check()
    shared = torch.optim.SGD([*make_model("small", 3).parameters(), twins.model[0].weight], lr=0.1)
    raises(UsageError, "'0.weight'", hvd.DistributedOptimizer, shared)
    fresh = torch.optim.SGD(make_model("small", 3).parameters(), lr=0.1)
    third = hvd.DistributedOptimizer(fresh)
    raises(UsageError, "'0.weight'", third.add_param_group, {"params": [twins.model[0].weight]})
    assert len(third.param_groups) == 1
    added = torch.nn.Parameter(torch.zeros(3))
    third.add_param_group({"params": [added]})
    assert third._parameter_names[added] == "group1.parameter0"
    third.step()


# ---- DistributedDataParallel ---------------------------------------------------------------------------------------


@check(on=("processes",), first=("ddp", "sordino"))
def beside_ddp(seat: Seat, first: str) -> None:
    """DDP and a wrapper would average the same gradients, so whichever comes second raises. Each of them alone
    trains."""
    store = torch.distributed.FileStore(f"{seat.folder}/store.{first}", seat.size)
    torch.distributed.init_process_group("gloo", store=store, rank=seat.rank, world_size=seat.size)
    try:
        model = make_model("small", 3)
        if first == "ddp":
            ddp = nn.parallel.DistributedDataParallel(model)
            raises(UsageError, "DistributedDataParallel", hvd.DistributedOptimizer, sgd(model))
            raises(UsageError, "'module.0.weight'", hvd.DistributedOptimizer, sgd(ddp), ddp.named_parameters())
            nn.parallel.DistributedDataParallel(make_model("small", 3))
            del ddp
            hvd.DistributedOptimizer(sgd(model))
        else:
            optimizer = hvd.DistributedOptimizer(sgd(model))
            raises(UsageError, "claims.py:", nn.parallel.DistributedDataParallel, model)
            del optimizer
            nn.parallel.DistributedDataParallel(model)
    finally:
        gc.collect()
        torch.distributed.destroy_process_group()


# ---- steps that bypass step() --------------------------------------------------------------------------------------


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimization as its authors publish it: two half steps, or one step with a closure."""

    def __init__(self, parameters: object, rho: float = 0.05, **options: object) -> None:
        super().__init__(parameters, {"rho": rho, **options})
        self.base = torch.optim.SGD(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for parameter in parameters:
            self.state[parameter]["before"] = parameter.detach().clone()
            parameter.add_(parameter.grad * (self.param_groups[0]["rho"] / norm))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.copy_(self.state[parameter]["before"])
        self.base.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Callable[[], object]) -> None:  # type: ignore[override]
        self.first_step(zero_grad=True)
        with torch.enable_grad():
            closure()
        self.second_step()


def sam(model: nn.Module) -> torch.optim.Optimizer:
    return Sam(model.parameters(), lr=0.1)


@check(algorithm=("allreduce", "crossover"))
def half_steps_are_refused(seat: Seat, algorithm: str) -> None:
    """Half steps raise, since gossip would exchange nothing in them. A step with a closure is allowed."""
    twins = Twins(seat, make=sam, algorithm=None if algorithm == "allreduce" else Crossover(group_size=seat.size))
    for _ in range(3):
        mine, whole = twins.batches()
        for model, optimizer, data in (
            (twins.model, twins.optimizer, mine),
            (twins.twin, twins.reference, whole),
        ):
            loss_of(model, *data).backward()

            def closure(model: nn.Module = model, data: list[torch.Tensor] = data) -> None:
                loss_of(model, *data).backward()

            optimizer.step(closure)
            optimizer.zero_grad()
    twins.check()
    twins.backward()
    twins.optimizer.first_step(zero_grad=True)
    loss_of(twins.model, *twins.batches()[0]).backward()
    raises(StepOrderError, "closure", twins.optimizer.second_step)
    twins.optimizer.zero_grad()


ANY = {
    "allreduce": lambda seat: AllReduce(),
    "late": lambda seat: AllReduce(double_buffering=True),
    "gossip": lambda seat: Crossover(),
    "local": lambda seat: LocalSGD(2),
    "sharded": lambda seat: LocalSGD(1, seat.size),
    "layered": lambda seat: Layered(group_size=1),
    "caps": lambda seat: CaPS(threshold=1.0),
}


@check(algorithm=ANY, least=2)
def steps_of_the_bare_optimizer_are_refused(seat: Seat, algorithm: str) -> None:
    model = make_model("small", 3, torch.float32)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    another = torch.optim.Adam([nn.Parameter(torch.ones(2)), *model.parameters()], lr=0.1)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), algorithm=ANY[algorithm](seat))
    for turn in range(3):
        optimizer.zero_grad()
        loss_of(model, *batch(ROWS, turn + seat.rank, torch.float32)).backward()
        if turn:
            raises(StepOrderError, "claims.py:", plain.step)
            raises(StepOrderError, "", another.step)  # any text: a gradient may be in flight
        optimizer.step()
        optimizer.flush()
        if turn:
            raises(StepOrderError, "step() of an unwrapped SGD", plain.step)
    optimizer.state_dict()
    del optimizer
    gc.collect()
    plain.step()


# ---- parameters that are added, replaced or removed ----------------------------------------------------------------


def _append(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
    optimizer.param_groups[0]["params"].append(parameter)


BEHIND: dict[str, Callable[[torch.optim.Optimizer, torch.Tensor], None]] = {
    "add_param_group": lambda optimizer, parameter: optimizer.add_param_group({"params": [parameter]}),
    "append": _append,
    "replace": lambda optimizer, parameter: optimizer.param_groups[0]["params"].__setitem__(0, parameter),
    "remove": lambda optimizer, parameter: optimizer.param_groups[0]["params"].pop(0),
}


class Late(nn.Module):
    """A model that gets another layer later."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 3).double()
        self.extra = nn.Parameter(torch.full((3,), 0.5, dtype=torch.float64), requires_grad=False)
        nn.init.constant_(self.first.weight, 0.1)
        nn.init.constant_(self.first.bias, 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) * self.extra


@check(how=BEHIND, op=("Average", "Sum"), set_to_none=(True, False))
def parameters_changed_behind_the_wrapper(seat: Seat, how: str, op: str, set_to_none: bool) -> None:
    """Parameters that change without the wrapper are noticed in the next step, and their gradients are reduced in
    it."""
    models = [Late(), Late()]
    plain = [torch.optim.SGD(model.first.parameters(), lr=0.1, momentum=0.9) for model in models]
    optimizer = hvd.DistributedOptimizer(plain[0], op=getattr(hvd, op))
    factor = 1 if op == "Average" else seat.size
    for turn in range(7):
        if turn == 3:
            for model, one in zip(models, plain):
                model.extra.requires_grad_(True)
                BEHIND[how](one, model.extra)
        optimizer.zero_grad(set_to_none=set_to_none)
        plain[1].zero_grad()
        loss_of(models[0], *batch(ROWS, 10 * turn + seat.rank)).backward()
        for rank in range(seat.size):
            (loss_of(models[1], *batch(ROWS, 10 * turn + rank)) * factor / seat.size).backward()
        optimizer.step()
        plain[1].step()
        for (name, mine), wanted in zip(models[0].named_parameters(), models[1].parameters()):
            torch.testing.assert_close(mine, wanted, atol=1e-10, rtol=1e-10)
            seat.same(name, mine)


@check()
def parameters_that_come_and_go(seat: Seat) -> None:
    """Parameters are replaced, removed and appended in each step. Their names never repeat, and the old ones are
    freed."""
    plain = torch.optim.SGD([nn.Parameter(torch.ones(number + 1)) for number in range(3)], lr=1.0)
    optimizer = hvd.DistributedOptimizer(plain)
    group = plain.param_groups[0]["params"]
    old: list[weakref.ref[torch.Tensor]] = []
    for turn in range(6):
        optimizer.zero_grad()
        sum((parameter * (seat.rank + 1.0)).sum() for parameter in group).backward()
        optimizer.step()
        assert all(torch.equal(one.grad, torch.full_like(one, (seat.size + 1) / 2)) for one in group)
        assert len(optimizer._parameter_names) == len(set(optimizer._parameter_names.values())) == 3
        old += [weakref.ref(group[turn % 2]), weakref.ref(group[1 - turn % 2])]
        group[turn % 2] = nn.Parameter(torch.ones(turn + 4))
        del group[1 - turn % 2]
        group.append(nn.Parameter(torch.ones(turn + 2)))
        plain.state.clear()
    optimizer.zero_grad()
    sum(parameter.sum() for parameter in group).backward()
    optimizer.step()
    gc.collect()
    assert all(one() is None for one in old)


@check(least=2)
def parameters_changed_on_one_rank_only(seat: Seat) -> None:
    """All ranks raise in the next backward. Training continues after the rank has undone its change."""
    model = Late()
    plain = torch.optim.SGD(model.first.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(plain)
    model.extra.requires_grad_(True)

    def backward() -> None:
        optimizer.zero_grad()
        loss_of(model, *batch(ROWS, seat.rank)).backward()

    for turn in range(4):
        if turn == 2 and seat.rank == 0:
            _append(plain, model.extra)
        if turn == 2:
            raises(OperationMismatch, "changed the parameters of their optimizers", backward)
            if seat.rank == 0:
                plain.param_groups[0]["params"].pop()
            continue
        backward()
        if turn == 3:
            _append(plain, model.extra)
            raises(StepOrderError, "between backward", optimizer.step)
            plain.param_groups[0]["params"].pop()
        optimizer.step()
    if seat.rank == 0:
        _append(plain, model.extra)
    else:
        _append(plain, nn.Parameter(torch.ones(5, dtype=torch.float64)))
    backward()
    raises(LayoutMismatch, "different models", optimizer.step)


@check(algorithm=[name for name in ANY if name != "allreduce"], least=2)
def parameters_that_an_algorithm_cannot_take_in(seat: Seat, algorithm: str) -> None:
    model = make_model("small", 3, torch.float32)
    plain = torch.optim.SGD(model[0].parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(plain, algorithm=ANY[algorithm](seat))
    for turn in range(3):
        if turn == 1:
            plain.add_param_group({"params": list(model[2].parameters())})
        optimizer.zero_grad()
        loss_of(model, *batch(ROWS, turn + seat.rank, torch.float32)).backward()
        if turn == 1:
            raises(UsageError, "add_param_group", optimizer.step)
            del plain.param_groups[1]
        optimizer.step()
    optimizer.flush()


class Ahead(torch.optim.Optimizer):
    """An outer optimizer like Lookahead: it has the parameters of an inner optimizer and calls the inner step."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base
        super().__init__(base.param_groups, {})

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)


@check()
def an_outer_optimizer_lets_the_wrapper_step(seat: Seat) -> None:
    twins = Twins(seat)
    wrapper, twins.optimizer = twins.optimizer, Ahead(twins.optimizer)
    twins.train(2)
    twins.check()
    twins.optimizer = wrapper
    twins.train(1)
    twins.check()


@check()
def a_wrapper_may_be_made_in_inference_mode(seat: Seat) -> None:
    model = make_model("small", 3)
    with torch.inference_mode():
        optimizer = hvd.DistributedOptimizer(sgd(model))
    loss_of(model, *batch(ROWS, seat.rank)).backward()
    optimizer.step()
    seat.same("model", *model.parameters())
