"""When backward() returns, gradients are the ones that step() uses: they can be clipped, logged and unscaled as in
scripts for DDP."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import sordino.torch as hvd
from checks.agreement import raises
from checks.models import loss_of
from checks.odd import OPTIMIZERS, Odd, batch, wrap
from checks.registry import Seat, check
from checks.training import Twins
from sordino.algorithms import AllReduce, CaPS, Crossover, Layered, LocalSGD
from sordino.errors import StepOrderError, UsageError
from sordino.runtime.context import current

HOW = {
    "average": lambda seat: {},
    "sum": lambda seat: {"op": hvd.Sum},
    "groups": lambda seat: {"groups": 2},
    "predivided": lambda seat: {"gradient_predivide_factor": 2.0},
    "small segments": lambda seat: {"algorithm": AllReduce(bucket_bytes=64)},
    "local sgd": lambda seat: {"algorithm": LocalSGD(1, seat.size, "allreduce")},
    "gossip": lambda seat: {"algorithm": Crossover(group_size=seat.size)},
}


def limited(twins: Twins, limit: float) -> None:
    """Clip the gradients of both models by norm, then by value."""
    norms = [torch.nn.utils.clip_grad_norm_(model.parameters(), limit) for model in (twins.model, twins.twin)]
    torch.testing.assert_close(*norms, atol=1e-12, rtol=1e-12)
    assert norms[0] > limit, "nothing would be clipped"
    for model in (twins.model, twins.twin):
        torch.nn.utils.clip_grad_value_(model.parameters(), limit / 3)
    twins.check_gradients()


@check(how=HOW)
def clipping_as_with_ddp(seat: Seat, how: str) -> None:
    twins = Twins(seat, **HOW[how](seat))
    factor = seat.size if how == "sum" else 1
    for turn in range(4):
        twins.zero(set_to_none=turn < 2)
        mine, whole = twins.batches()
        loss_of(twins.model, *mine).backward()
        (loss_of(twins.twin, *whole) * factor).backward()
        assert twins.optimizer.gradients_ready()
        twins.check_gradients()
        limited(twins, 0.1)
        twins.step()
    twins.check()


@check(passes=(1, 2), quiet=(True, False))
def several_passes(seat: Seat, passes: int, quiet: bool) -> None:
    """Several passes: by backward_passes_per_step, with no_sync(), or with neither. With neither, each pass reduces
    gradients, with a warning."""
    twins = Twins(seat, backward_passes_per_step=passes)
    for _ in range(3):
        twins.zero()
        if passes == 1 and quiet:
            with twins.optimizer.no_sync():
                twins.backward()
        elif passes == 1 or quiet:
            twins.backward()
        twins.backward()
        if passes == 2 and not quiet:  # one pass is missing, and step() makes up for it
            twins.step()
            continue
        twins.check_gradients()
        limited(twins, 0.05)
        twins.step()
    twins.check()


@check(set_to_none=(True, False))
def some_are_used_by_some_or_none(seat: Seat, set_to_none: bool) -> None:
    """Some layers are used by some ranks only or by none, from the first step on. The users change from step to
    step."""
    layers = nn.ModuleList(nn.Linear(3, 3, dtype=torch.float64) for _ in range(4))
    hvd.broadcast_parameters(layers.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layers.parameters(), lr=0.1))
    for turn in range(4):
        optimizer.zero_grad(set_to_none=set_to_none)
        uses = lambda rank, layer, turn=turn: layer == 0 or (layer < 3 and (rank + turn + layer) % 2 == 0)  # noqa: E731
        inputs = [torch.full((1, 3), 1.0 + rank, dtype=torch.float64) for rank in range(seat.size)]
        sum(layer(inputs[seat.rank]).sum() for i, layer in enumerate(layers) if uses(seat.rank, i)).backward()
        for i, layer in enumerate(layers):
            users = [rank for rank in range(seat.size) if uses(rank, i)]
            if users:
                wanted = sum(inputs[rank] for rank in users).expand(3, 3) / seat.size
                torch.testing.assert_close(layer.weight.grad, wanted)
            else:
                assert layer.weight.grad is None or not layer.weight.grad.any()
        torch.nn.utils.clip_grad_norm_(layers.parameters(), 0.1)
        optimizer.step()
        for layer in layers:
            seat.same("weight", layer.weight)


@check(reentrant=(True, False), head=(True, False), least=2)
def checkpointed_activations(seat: Seat, reentrant: bool, head: bool) -> None:
    """A backward inside a backward does not end the outer one."""
    blocks = [nn.Linear(4, 4, dtype=torch.float64) for _ in range(3)]
    last = nn.Linear(4, 1, dtype=torch.float64).requires_grad_(head)
    unused = nn.Linear(2, 2, dtype=torch.float64)
    parameters = [p for one in (*blocks, last, unused) for p in one.parameters()]
    for parameter in parameters:
        hvd.broadcast_(parameter.data, 0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.1))
    reduced_in_between = []

    def not_yet(_: torch.Tensor) -> None:
        reduced_in_between.append(optimizer.gradients_ready())

    for turn in range(3):
        optimizer.zero_grad()
        inputs = torch.randn(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(turn * 7 + seat.rank))
        inputs.requires_grad_()
        value = inputs
        for block in blocks:
            value = checkpoint(block, value, use_reentrant=reentrant)
            value.register_hook(not_yet)
        last(value).sum().backward()
        assert optimizer.gradients_ready()
        for block in blocks:
            seat.same("gradient", block.weight.grad)
        optimizer.step()
    assert reduced_in_between == [False] * 9


@check()
def penalties_of_gradients(seat: Seat) -> None:
    """A backward that builds a graph of gradients is not taken for the backward of the loss."""
    twins = Twins(seat)
    for _ in range(3):
        twins.zero()
        mine, whole = twins.batches()
        for model, data in ((twins.model, mine), (twins.twin, whole)):
            inputs = data[0].clone().requires_grad_()
            (slope,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
            (loss_of(model, *data) + slope.square().sum(1).mean()).backward()
        twins.check_gradients()
        limited(twins, 0.05)
        twins.step()
    twins.check()


@check(least=2)
def sums_are_not_added_up_twice(seat: Seat) -> None:
    twins = Twins(seat, op=hvd.Sum)
    for _ in range(2):
        twins.zero()
        twins.backward()
        mine, _ = twins.batches()
        raises(AssertionError, "no_sync", loss_of(twins.model, *mine).backward)
        twins.zero()
        twins.model.zero_grad()
        loss_of(twins.model, *mine).backward()  # after clearing, all starts again
        twins.model.zero_grad()
        loss_of(twins.model, *mine).backward()
        twins.optimizer.step()
        for parameter in twins.model.parameters():
            seat.same("parameter", parameter)


@check(least=2)
def closures_decide_alike(seat: Seat) -> None:
    """All ranks decide alike about a closure, even if each rank's own loss would end its line search at another
    point."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=6, line_search_fn="strong_wolfe")

    twins = Twins(seat, make=make)
    for _ in range(3):
        mine, whole = twins.batches()
        told = []
        for model, optimizer, data in (
            (twins.model, twins.optimizer, mine),
            (twins.twin, twins.reference, whole),
        ):

            def closure(model: nn.Module = model, optimizer: object = optimizer, data: list = data) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, *data)
                loss.backward()
                return loss

            told.append(optimizer.step(closure))
        torch.testing.assert_close(told[0].detach(), told[1].detach(), atol=1e-9, rtol=1e-9)
    twins.check(1e-6)


class Thrice(torch.optim.SGD):
    """Optimizer that evaluates its closure three times in chosen steps."""

    def __init__(self, *arguments: object, thrice: tuple[bool, ...], **options: object) -> None:
        super().__init__(*arguments, **options)
        self.thrice = list(thrice)

    def step(self, closure: Callable[[], object]) -> object:  # type: ignore[override]
        losses = [closure() for _ in range(3 if self.thrice.pop(0) else 1)]
        super().step()
        return losses if len(losses) > 1 else losses[0]


@check(least=2)
def a_loss_is_reduced_where_a_closure_is_evaluated_again(seat: Seat) -> None:
    """A loss is reduced only if the optimizer evaluates the closure again. An optimizer that evaluates it once, as in
    Lightning, returns this rank's loss, and sends nothing for it."""
    weight = nn.Parameter(torch.zeros(2))
    mean = (seat.size - 1) / 2

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        weight.sum().backward()
        return torch.tensor(float(seat.rank))

    other = nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam([weight], lr=0.1))
    plain = hvd.DistributedOptimizer(torch.optim.Adam([other], lr=0.1))
    for _ in range(3):
        start = current().world.stats["operations"]
        assert optimizer.step(closure) == seat.rank
        middle = current().world.stats["operations"]
        plain.zero_grad()
        other.sum().backward()
        plain.step()
        assert current().world.stats["operations"] - middle == middle - start
    assert optimizer.step(lambda: None) is None
    del optimizer
    optimizer = hvd.DistributedOptimizer(Thrice([weight], lr=0.1, thrice=(False, False, True, False)))
    assert optimizer.step(closure) == mean
    assert optimizer.step(closure) == mean
    assert optimizer.step(closure) == [mean, mean, mean]
    assert optimizer.step(closure) == mean
    seat.same("weight", weight)


PENDING = {
    "sharded": lambda seat: LocalSGD(1, seat.size),
    "layered": lambda seat: Layered(group_size=1),
}


@check(algorithm=PENDING, least=2)
def who_uses_a_gradient_under_way_is_told(seat: Seat, algorithm: str) -> None:
    model = Odd()
    optimizer = wrap(model, PENDING[algorithm](seat))
    clip = torch.nn.utils.clip_grad_norm_
    for turn in range(3):
        optimizer.zero_grad()
        inputs, targets = batch(seat.rank, turn)
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        assert not optimizer.gradients_ready()
        raises(StepOrderError, "clip_grad_norm_", clip, model.parameters(), 0.1)
        raises(StepOrderError, "synchronize", model.first.grad.norm)
        raises(StepOrderError, "'first'", lambda: model.first.grad.data)
        assert len(optimizer.param_groups) >= 1
        if algorithm == "sharded":
            raises(StepOrderError, "synchronize", clip, optimizer.param_groups[0]["params"], 0.1)
        if turn == 1:
            optimizer.synchronize()
            assert optimizer.gradients_ready()
            seat.same("norm", clip(model.parameters(), 0.1))
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
        if algorithm == "sharded" and turn != 1:
            raises(StepOrderError, "this rank's own gradient", model.first.grad.norm)
            model.zero_grad(set_to_none=False)
        model.zero_grad()
    inputs, targets = batch(seat.rank, 9)
    torch.nn.functional.mse_loss(model(inputs), targets).backward()
    model.first.grad = torch.zeros_like(model.first)
    raises(StepOrderError, "'first'", optimizer.step)
    model.first.grad = None
    optimizer.step()


ANY = {
    "allreduce": lambda seat: AllReduce(),
    "sharded": lambda seat: LocalSGD(1, seat.size),
    "layered": lambda seat: Layered(group_size=1),
    "caps": lambda seat: CaPS(threshold=1.0),
    "groups": lambda seat: Crossover(group_size=seat.size),
}


@check(algorithm=ANY, kind=(2.0, 1.0, math.inf))
def an_optimizer_clips(seat: Seat, algorithm: str, kind: float) -> None:
    """clip_grad_norm_() leads to the same models as clipping the average. If each rank has its own model, each uses its
    own norm."""
    model, plain = Odd(), Odd()
    optimizer = wrap(model, ANY[algorithm](seat), OPTIMIZERS["sgd"])
    reference = OPTIMIZERS["sgd"](list(plain.parameters()))
    alone = algorithm == "caps"
    for turn in range(4):
        optimizer.zero_grad()
        reference.zero_grad()
        inputs, targets = batch(seat.rank, turn)
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        norm = optimizer.clip_grad_norm_(0.05, kind)
        for rank in [seat.rank] if alone else range(seat.size):
            inputs, targets = batch(rank, turn)
            (torch.nn.functional.mse_loss(plain(inputs), targets) / (1 if alone else seat.size)).backward()
        wanted = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05, kind)
        torch.testing.assert_close(norm.to(torch.float64), wanted.to(torch.float64), atol=1e-6, rtol=1e-5)
        assert wanted > 0.05, "nothing would be clipped"
        optimizer.step()
        reference.step()
        for mine, other in zip(model.parameters(), plain.parameters()):
            if alone:
                other.data.copy_(hvd.allreduce(other.data))
            torch.testing.assert_close(mine.detach(), other.detach(), atol=1e-5, rtol=1e-4)
    assert optimizer.clip_grad_norm_(1.0, kind) >= 0


@check(least=2)
def leaders_evaluate_closures_once(seat: Seat) -> None:
    """An optimizer that evaluates a closure again would do so on leaders only, and wait for their groups forever."""
    algorithm = Crossover(group_size=seat.size, within="leader")
    for make in (torch.optim.SGD, torch.optim.LBFGS):
        value = torch.nn.Parameter(torch.zeros(3))

        def closure(value: torch.nn.Parameter = value) -> torch.Tensor:
            value.grad = None
            loss = (seat.rank * value).sum()
            loss.backward()
            return loss

        optimizer = hvd.DistributedOptimizer(make([value], lr=1.0), algorithm=algorithm)
        if make is torch.optim.SGD:
            optimizer.step(closure)
            assert value.tolist() == [-(seat.size - 1) / 2] * 3
        else:
            raises(UsageError, "Crossover(within='leader'): LBFGS may evaluate", optimizer.step, closure)
