"""Hooks of users have the same effect as with DDP, whenever they are registered; exceptions in backward."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

import sordino.torch as hvd
from checks.agreement import raises
from checks.models import batch, loss_of, make_model
from checks.odd import Odd
from checks.odd import batch as odd_batch
from checks.registry import Seat, check
from checks.training import ROWS, sgd
from sordino.algorithms import AllReduce, CaPS, Crossover, Layered, LocalSGD
from sordino.errors import NonFinite, StepOrderError, UsageError
from sordino.runtime.context import current

ALGORITHMS: dict[str, Callable[[Seat], Any]] = {
    "allreduce": lambda seat: AllReduce(bucket_bytes=64),
    "late plan": lambda seat: AllReduce(),
    "local": lambda seat: LocalSGD(1, seat.size, "allreduce"),
    "sharded": lambda seat: LocalSGD(1, seat.size),
    "crossover": lambda seat: Crossover(group_size=seat.size),
    "caps": lambda seat: CaPS(threshold=100.0, probe_interval=1),
    "layered": lambda seat: Layered(group_size=1),
}


# ---- kinds of hooks: the average of each hook's results differs from its result for the average ----------------------


def _clipped(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * (0.1 / gradient.norm().clamp(min=0.1))


def _on_tensors(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.register_hook(_clipped)


def _on_accumulated(model: nn.Module) -> None:
    def clip(parameter: torch.Tensor) -> None:
        parameter.grad.copy_(_clipped(parameter.grad))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(clip)


def _on_replaced(model: nn.Module) -> None:
    def clip(parameter: torch.Tensor) -> None:
        parameter.grad = _clipped(parameter.grad)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(clip)


def _on_modules(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_full_backward_pre_hook(lambda _, gradients: tuple(map(_clipped, gradients)))
            module.register_full_backward_hook(
                lambda _, into, __: tuple(None if g is None else _clipped(g) for g in into)
            )


def _on_several(model: nn.Module) -> None:
    """Change in place the last gradient of several, which is not accumulated yet."""

    def clip(gradients: Any) -> None:
        gradients[0].copy_(_clipped(gradients[0]))

    first = next(iter(model.parameters()))
    register_multi_grad_hook([first], clip)


HOOKS: dict[str, Callable[[nn.Module], None]] = {
    "tensor": _on_tensors,
    "post-accumulate": _on_accumulated,
    "post-accumulate, replacing": _on_replaced,
    "module": _on_modules,
    "multi-grad": _on_several,
}
WHEN = ("before", "after")


def averaged(model: nn.Module, seat: Seat, turn: int) -> None:
    """Give the model the mean of all ranks' gradients, each with its hooks applied."""
    sums: list[torch.Tensor] = []
    for rank in range(seat.size):
        model.zero_grad()
        loss_of(model, *batch(ROWS, 10 * turn + rank)).backward()
        mine = [parameter.grad / seat.size for parameter in model.parameters()]
        sums = [one + other for one, other in zip(sums, mine)] if sums else mine
    for parameter, gradient in zip(model.parameters(), sums):
        parameter.grad = gradient


@check(kind=HOOKS, when=WHEN, algorithm=ALGORITHMS)
def hooks_as_with_ddp(seat: Seat, kind: str, when: str, algorithm: str) -> None:
    model, twin = make_model("small", 3), make_model("small", 3)
    HOOKS[kind](twin)
    if when == "before":
        HOOKS[kind](model)
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), algorithm=ALGORITHMS[algorithm](seat))
    if when == "after":
        HOOKS[kind](model)
    reference = sgd(twin)
    for turn in range(5):
        optimizer.zero_grad(set_to_none=turn < 3)
        loss_of(model, *batch(ROWS, 10 * turn + seat.rank)).backward()
        averaged(twin, seat, turn)
        if optimizer.gradients_ready() and algorithm != "caps":
            for mine, wanted in zip(model.parameters(), twin.parameters()):
                torch.testing.assert_close(mine.grad, wanted.grad, atol=1e-12, rtol=1e-12)
        optimizer.step()
        reference.step()
    optimizer.flush()
    for (name, mine), wanted in zip(model.named_parameters(), twin.parameters()):
        torch.testing.assert_close(mine, wanted, atol=1e-11, rtol=1e-11)
        seat.same(name, mine)


@contextmanager
def gloo(seat: Seat) -> Iterator[None]:
    store = torch.distributed.FileStore(f"{seat.folder}/gloo", seat.size)
    torch.distributed.init_process_group("gloo", store=store, rank=seat.rank, world_size=seat.size)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@check(on=("processes",))
def ddp_itself_gives_that(seat: Seat) -> None:
    """DDP over gloo gives the gradients of `averaged`, so `hooks_as_with_ddp` compares with DDP."""
    with gloo(seat):
        for hook in HOOKS.values():
            for when in WHEN:
                model, twin = make_model("small", 3), make_model("small", 3)
                hook(twin)
                if when == "before":
                    hook(model)
                ddp = nn.parallel.DistributedDataParallel(model)
                if when == "after":
                    hook(model)
                for turn in range(3):
                    model.zero_grad()
                    loss_of(ddp, *batch(ROWS, 10 * turn + seat.rank)).backward()
                    averaged(twin, seat, turn)
                    for mine, wanted in zip(model.parameters(), twin.parameters()):
                        torch.testing.assert_close(mine.grad, wanted.grad, atol=1e-12, rtol=1e-12)
                del ddp


@check(least=2, algorithm=("allreduce", "sharded", "layered"))
def a_gradient_that_is_changed_under_way_is_told(seat: Seat, algorithm: str) -> None:
    """A module's hook runs after the gradients of its parameters, which may be in flight by then. Changing one
    raises."""
    model = make_model("small", 3)
    kind = AllReduce(bucket_bytes=8) if algorithm == "allreduce" else ALGORITHMS[algorithm](seat)
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), algorithm=kind)

    def double(module: nn.Module, *_: Any) -> None:
        module.weight.grad.mul_(2)

    def one_step() -> None:
        optimizer.zero_grad()
        inputs, targets = batch(ROWS, seat.rank)
        loss_of(model, inputs.requires_grad_(), targets).backward()
        optimizer.step()
        optimizer.flush()

    one_step()
    handle = model[0].register_full_backward_hook(double)
    raises(StepOrderError, "'0.weight' was changed while", one_step)
    handle.remove()
    optimizer.zero_grad()
    for _ in range(2):
        one_step()
    seat.same("model", *model.parameters())


@check(least=2, algorithm=ALGORITHMS)
def derivatives_of_averages_are_refused(seat: Seat, algorithm: str) -> None:
    model = make_model("small", 3)
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), algorithm=ALGORITHMS[algorithm](seat))
    data = batch(ROWS, seat.rank)
    if algorithm == "caps":  # each rank uses its own gradients
        loss_of(model, *data).backward(create_graph=True)
    else:
        with pytest.raises(UsageError, match=r"create_graph=True.*torch\.autograd\.grad"):
            loss_of(model, *data).backward(create_graph=True)
    optimizer.zero_grad()
    with optimizer.no_sync():
        loss_of(model, *data).backward(create_graph=True)
    for parameter in model.parameters():
        parameter.grad = None
    loss_of(model, *data).backward()
    optimizer.step()
    optimizer.flush()
    seat.same("model", *model.parameters())


# ---- exceptions in backward ----------------------------------------------------------------------------------------


class Boom(Exception):
    pass


def failing(parameter: torch.Tensor) -> Any:
    """Register a hook that raises Boom when the gradient of this parameter is ready; return its handle."""

    def hook(_: torch.Tensor) -> None:
        raise Boom

    return parameter.register_hook(hook)


@check(least=2, algorithm=("allreduce", "local", "sharded", "crossover", "layered"), way=("zero_grad", "synchronize"))
def an_exception_in_every_backward(seat: Seat, algorithm: str, way: str) -> None:
    """All ranks catch it and continue with the next batch. Errors of calls that are not allowed name the calls that
    are."""
    model = make_model("small", 3)
    kind = AllReduce(bucket_bytes=8) if algorithm == "allreduce" else ALGORITHMS[algorithm](seat)
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), algorithm=kind)

    def backward(seed: int) -> None:
        loss_of(model, *batch(ROWS, 10 * seed + seat.rank)).backward()

    for turn in range(6):
        optimizer.zero_grad()
        if turn in (2, 4):
            handle = failing(model[0].bias)
            raises(Boom, "", backward, turn)
            handle.remove()
            for call in (optimizer.step, *([optimizer.zero_grad] if optimizer._strategy.in_flight else [])):
                raises(StepOrderError, "optimizer.synchronize() and then optimizer.zero_grad()", call)
            if optimizer._strategy.in_flight:
                raises(StepOrderError, "backward() cannot begin", backward, turn)
            if way == "synchronize" or optimizer._strategy.in_flight:
                optimizer.synchronize()
            optimizer.zero_grad()
        backward(turn)
        optimizer.step()
    optimizer.flush()
    seat.same("model", *model.parameters())


@check(least=2)
def an_exception_in_one_backward(seat: Seat) -> None:
    """The others wait for the rank that raised. It takes the step with them, with the gradients that it has."""
    model = make_model("small", 3)
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), algorithm=AllReduce(bucket_bytes=8))
    for turn in range(4):
        optimizer.zero_grad()
        handle = failing(model[0].bias) if turn == 2 and seat.rank == 0 else None
        try:
            loss_of(model, *batch(ROWS, 10 * turn + seat.rank)).backward()
            optimizer.step()
        except Boom:
            raises(StepOrderError, "optimizer.skip_synchronize()", optimizer.step)
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
        if handle is not None:
            handle.remove()
        seat.same("model", *model.parameters())


# ---- gradients that are sent for nothing -----------------------------------------------------------------------------


def told_in(work: Callable[[], None]) -> str:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        work()
    return " ".join(str(one.message) for one in found)


@check(least=2, on=("processes",))
def every_wasted_reduction_of_a_gan_is_named(seat: Seat) -> None:
    """The discriminator's gradients are sent for real images, for false ones, and when the generator learns through
    it."""
    d, g = make_model("matrices", 3), nn.Linear(6, 6).double()
    hvd.broadcast_parameters(g.state_dict(), 0)
    real, noise = batch(ROWS, seat.rank)[0], batch(ROWS, 7 + seat.rank)[0]
    optimizers = [hvd.DistributedOptimizer(sgd(one), one.named_parameters()) for one in (d, g)]

    def iteration(quiet: bool) -> None:
        d.zero_grad()
        with optimizers[0].no_sync() if quiet else warnings.catch_warnings():
            d(real).mean().backward()
        false = g(noise)
        (-d(false.detach()).mean()).backward()
        optimizers[0].step()
        g.zero_grad()
        with optimizers[0].no_sync() if quiet else warnings.catch_warnings():
            d(false).mean().backward()
        optimizers[1].step()

    iteration(quiet=True)
    told = told_in(lambda: [iteration(quiet=False) for _ in range(2)])
    assert "adds to '2.weight'" in told or "adds to '0.weight'" in told, told
    assert "cleared before a step() used them" in told and "generator" in told, told
    optimizers[0].zero_grad()
    assert told_in(lambda: [iteration(quiet=True) for _ in range(2)]) == ""


@check()
def repeated_reductions_keep_no_requests(seat: Seat) -> None:
    """A backward without a step leaves nothing behind, however often it runs."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.0))
    for _ in range(4):
        optimizer.zero_grad(set_to_none=False)
        weight.sum().backward()
        optimizer.step()
    for _ in range(20):
        weight.grad.zero_()
        weight.sum().backward()
    for bucket in optimizer._strategy.reducer._buckets or ():
        assert bucket.places is None or len(bucket.places.requests) == 1
    assert not current().world.names_in_flight()


# ---- names -----------------------------------------------------------------------------------------------------------


@check(least=2)
def names_that_optimizers_have_are_used(seat: Seat) -> None:
    """An optimizer of torch 2.6 or newer that got named parameters has their names in its groups."""
    model = make_model("small", 3)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    plain.param_groups[0]["param_names"] = [name for name, _ in model.named_parameters()]
    optimizer = hvd.DistributedOptimizer(plain, op=hvd.Sum)
    loss_of(model, *batch(ROWS, 1)).backward()
    raises(StepOrderError, "'2.bias'", loss_of(model, *batch(ROWS, 1)).backward)
    optimizer.zero_grad()


# ---- scaling ---------------------------------------------------------------------------------------------------------


@check(least=2, exchange=("sharded", "allreduce"))
def a_scaler_unscales_what_quiet_passes_have_left(seat: Seat, exchange: str) -> None:
    """The step gets the sums of passes in no_sync() as averages, which are other tensors. The scaler must unscale
    these."""
    model, plain = Odd(), Odd().double()
    reference = torch.optim.SGD(plain.parameters(), lr=0.02)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.02),
        model.named_parameters(),
        algorithm=LocalSGD(1, seat.size, exchange),
    )
    for turn in range(4):
        optimizer.zero_grad()
        reference.zero_grad()
        with optimizer.no_sync():
            for part in range(2):
                inputs, targets = odd_batch(seat.rank, 2 * turn + part)
                scaler.scale(nn.functional.mse_loss(model(inputs), targets)).backward()
        for rank in range(seat.size):
            for part in range(2):
                inputs, targets = odd_batch(rank, 2 * turn + part)
                (nn.functional.mse_loss(plain(inputs.double()), targets.double()) / seat.size).backward()
        scaler.step(optimizer)
        scaler.update()
        reference.step()
        for mine, wanted in zip(model.parameters(), plain.parameters()):
            torch.testing.assert_close(mine.detach().double(), wanted.detach(), atol=1e-5, rtol=1e-4)


@check(least=2, passes=(1, 4))
def a_scaler_decides_alike_when_a_step_comes_early(seat: Seat, passes: int) -> None:
    """Only rank 0 has an infinite gradient, in no_sync() or in the first of four passes. All ranks skip this step."""
    model = make_model("small", 3)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), backward_passes_per_step=passes
    )
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for turn in range(3):
        bad = turn == 1 and seat.rank == 0
        with optimizer.no_sync() if passes == 1 else nullcontext():
            (scaler.scale(loss_of(model, *batch(ROWS, turn))) * (math.inf if bad else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        changed = any(not torch.equal(one, other) for one, other in zip(before, model.parameters()))
        assert changed == (turn != 1)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        for number, parameter in enumerate(before):
            seat.same(f"{turn}.{number}", parameter)
    assert scaler.get_scale() == 2.0


@check(least=2)
def gradients_of_a_new_parameter_are_checked(seat: Seat) -> None:
    """check_finite=True: a parameter joins the wrapped optimizer's group, and its first gradient is a NaN on rank 0."""
    model, added = make_model("small", 3), torch.nn.Parameter(torch.zeros(2))
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), check_finite=True)
    for turn in range(4):
        if turn == 1:
            plain.param_groups[0]["params"].append(added)
        optimizer.zero_grad()
        factor = math.nan if turn == 1 and seat.rank == 0 else 1.0
        (loss_of(model, *batch(ROWS, turn)) + (added * factor).sum()).backward()
        if turn == 1:
            before = [parameter.detach().clone() for parameter in model.parameters()]
            raises(NonFinite, "group0.parameter", optimizer.step)
            assert all(map(torch.equal, before, model.parameters())) and not added.any()
        else:
            optimizer.step()
    seat.same("added", added)
    assert torch.equal(added, torch.full((2,), -0.2))


@check(least=2)
def a_new_step_forgets_that_it_was_synchronized(seat: Seat) -> None:
    """After an exception in backward(), a script synchronizes and clears gradients. The next step does not warn."""
    model = make_model("small", 3)
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
    with seat.no_warnings():
        for turn in range(2):
            loss_of(model, *batch(ROWS, turn)).backward()
            if turn == 0:
                optimizer.synchronize()
                optimizer.zero_grad()
        optimizer.step()


@check(least=2)
def a_scaler_unscales_gradients_of_parameters_that_were_added(seat: Seat) -> None:
    """A parameter joins the wrapped optimizer's group before backward(). Its gradient is infinite on rank 0 only."""
    model, added = make_model("small", 3), torch.nn.Parameter(torch.zeros(2))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    loss_of(model, *batch(ROWS, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.param_groups[0]["params"].append(added)
    factor = math.inf if seat.rank == 0 else 1.0
    scaler.scale(loss_of(model, *batch(ROWS, 1)) + (added * factor).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0 and torch.equal(added, torch.zeros(2))
