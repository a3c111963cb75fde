"""Layered SGD: it gives the parameters of AllReduce, the first use of a parameter completes a step, and nothing waits
before."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import sordino.torch as hvd
from checks.odd import OPTIMIZERS, Make, Odd, batch, divisors, near, step, train, wrap
from checks.registry import Seat, check
from sordino.algorithms import AllReduce, Layered
from sordino.errors import UsageError
from sordino.runtime.context import current

LONG: dict[str, Make] = {  # these do not diverge in 50 steps
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.002, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
}
EVERYWHERE = ("", "one", "pairs")
"""Communicators as threads, and as ranks."""


def layered(group_size: int, **settings: Any) -> Layered:
    """Return the algorithm with this world's communicators if there are any, or else with groups of this size."""
    helpers = current().helpers
    if helpers is not None:
        return Layered(helpers.algorithm.group_size, "rank", **settings)
    return Layered(group_size, **settings)


@check(least=2, helpers=EVERYWHERE, name=tuple(LONG))
def layers_change_nothing(seat: Seat, name: str) -> None:
    wanted = train(seat, AllReduce(), 50, LONG[name])
    dedicated = current().helpers is not None
    for k in [seat.size] if dedicated else divisors(seat.size):
        algorithm = layered(k, bucket_bytes=300)
        found = train(seat, algorithm, 50, LONG[name])
        near(found, wanted)
        if algorithm.group_size == seat.size:
            equal(found, wanted)
        seat.same("model", *found.parameters())


def postponed(optimizer: Any) -> bool:
    """Return whether a step is still to be completed, without completing it."""
    return optimizer._strategy._postponed is not None


def equal(one: torch.nn.Module, other: torch.nn.Module) -> None:
    """Check that two models are nearly equal, and bit for bit in shared memory, where a group of all workers adds
    gradients in AllReduce's order."""
    near(one, other)
    if len(set(current().world.nodes)) == 1 and current().world.shares_memory:
        for mine, theirs in zip(one.parameters(), other.parameters()):
            assert torch.equal(mine, theirs)


@check(least=2, helpers=EVERYWHERE)
def nothing_waits_before_the_first_use(seat: Seat) -> None:
    """While one rank is late with its step, the others load their batches."""
    model = Odd()
    optimizer = wrap(model, layered(divisors(seat.size)[-2]))
    step(seat, model, optimizer, 0)
    model.state_dict()
    inputs, targets = batch(seat.rank, 1)
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    if seat.rank == 0:
        seat.meet("others", range(1, seat.size))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if seat.rank > 0:
        seat.meet("others", [seat.rank])
    seat.same("model", *model.parameters())


@check(least=2)
def rates_are_those_of_the_step(seat: Seat) -> None:
    models = []
    for algorithm in (Layered(seat.size), AllReduce()):
        model = Odd()
        optimizer = wrap(model, algorithm)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for turn in range(5):
            step(seat, model, optimizer, turn)
            scheduler.step()
            assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05 * 0.5 ** (turn + 1))
        models.append(model)
    equal(*models)


@check(least=2, passes=(1, 2), set_to_none=(True, False))
def gradients_are_cleared_after_their_use(seat: Seat, passes: int, set_to_none: bool) -> None:
    models = []
    for algorithm in (layered(seat.size), AllReduce()):
        model = Odd()
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS["momentum"](list(model.parameters())),
            model.named_parameters(),
            backward_passes_per_step=passes,
            algorithm=algorithm,
        )
        for turn in range(4):
            for part in range(passes):
                inputs, targets = batch(seat.rank, passes * turn + part)
                torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none)
        model.state_dict()
        assert all(p.grad is None or not p.grad.any() for p in model.parameters())
        models.append(model)
    equal(*models)


@check(least=2, helpers=("", "one"))
def the_last_step_is_not_lost(seat: Seat) -> None:
    model, plain = Odd(), Odd()
    optimizer, wanted = wrap(model, layered(seat.size)), wrap(plain, AllReduce())
    for turn in range(3):
        step(seat, model, optimizer, turn)
        step(seat, plain, wanted, turn)
    state = copy.deepcopy(optimizer.state_dict())
    twin = Odd()
    twin.load_state_dict(model.state_dict())
    resumed = wrap(twin, layered(seat.size))
    resumed.load_state_dict(state)
    with pytest.raises(ZeroDivisionError):
        step(seat, model, optimizer, 3)
        raise ZeroDivisionError
    step(seat, twin, resumed, 3)
    step(seat, plain, wanted, 3)
    equal(model, plain)
    equal(twin, plain)
    # The step is not lost either if a rank leaves before the first use of a parameter: shutdown() completes it.
    step(seat, model, optimizer, 4)
    step(seat, plain, wanted, 4)
    reducer = optimizer._strategy
    current().shutdown()
    assert reducer._postponed is None
    equal(model, plain)


@check(least=2, helpers=("", "one"))
def scalers_decide_alike(seat: Seat) -> None:
    model = torch.nn.Linear(8, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = wrap(model, layered(seat.size), lambda p: torch.optim.SGD(p, lr=1.0))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for infinite in (True, False):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 8)).sum()).backward(retain_graph=True)
        if infinite:
            inputs = torch.full((1, 8), torch.inf if seat.rank == 0 else 1.0)
            optimizer.synchronize()
            optimizer.zero_grad()
            scaler.scale(model(inputs).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        seat.same("scale", scaler.get_scale())
    assert scaler.get_scale() == 2.0
    torch.testing.assert_close(model.weight.detach(), torch.full((1, 8), -1.0))


def train_unequally(seat: Seat, algorithm: Any) -> tuple[Odd, int]:
    """Train with r steps on rank r; the last batch is shorter."""
    model = Odd()
    optimizer = wrap(model, algorithm)
    for turn in range(seat.rank):
        inputs, targets = batch(seat.rank, turn)
        rows = 2 if turn == seat.rank - 1 else 6
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs[:rows]), targets[:rows]).backward()
        optimizer.step()
        hvd.allreduce(torch.ones(1), name="of those who train")
    return model, hvd.join()


@check(least=2, helpers=EVERYWHERE)
def those_who_joined_stand_in_for_zeros(seat: Seat) -> None:
    wanted, last = train_unequally(seat, AllReduce())
    for k in divisors(seat.size):
        found, joined = train_unequally(seat, layered(k))
        assert joined == last == seat.last
        near(found, wanted)
    seat.same("later", hvd.allreduce(torch.arange(3.0)))


class Counting(torch.optim.SGD):
    """An optimizer that keeps its own counter among the hyper-parameters, as some optimizers do."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.05)
        self.param_groups[0]["count"] = 0

    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["count"] += 1
        self.param_groups[0]["rates"] = (*self.param_groups[0].get("rates", ()), self.param_groups[0]["lr"])
        super().step()


@check(least=2)
def optimizers_keep_what_they_change(seat: Seat) -> None:
    model = Odd()
    optimizer = wrap(model, Layered(seat.size), Counting)
    for turn in range(3):
        step(seat, model, optimizer, turn)
        optimizer.param_groups[0]["lr"] = 0.01 * (turn + 1)
    model.state_dict()
    assert optimizer.param_groups[0]["count"] == 3
    assert optimizer.param_groups[0]["rates"] == (0.05, 0.01, 0.02)
    assert optimizer.param_groups[0]["lr"] == 0.03


@check(least=2)
def two_optimizers_are_postponed_at_once(seat: Seat) -> None:
    models = []
    for algorithm in (Layered(seat.size), AllReduce()):
        pair = [Odd(), Odd()]
        optimizers = [wrap(model, algorithm) for model in pair]
        for turn in range(3):
            for k in (0, 1) if turn % 2 else (1, 0):
                step(seat, pair[k], optimizers[k], turn + k)
        if isinstance(algorithm, Layered):
            assert all(map(postponed, optimizers))
        models.append(pair)
    for mine, theirs in zip(*models):
        equal(mine, theirs)


@check(least=2)
def impossible_layers_are_refused(seat: Seat) -> None:
    for field, value in (("group_size", 0), ("bucket_bytes", 0), ("check_stale", 2), ("communicator", "leader")):
        with pytest.raises(UsageError, match=field):
            Layered(**{field: value})
    with pytest.raises(UsageError, match="cannot be divided into groups"):
        wrap(Odd(), Layered(seat.size + 1))
    with pytest.raises(UsageError, match=r"hvd\.init\(algorithm="):
        wrap(Odd(), Layered(1, "rank"))
    for option, text in (
        ({"op": hvd.Sum}, "averages"),
        ({"compression": hvd.Compression.fp16}, "compression"),
        ({"gradient_predivide_factor": 2.0}, "gradient_predivide_factor"),
    ):
        model = Odd()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(UsageError, match=text):
            hvd.DistributedOptimizer(sgd, model.named_parameters(), algorithm=Layered(seat.size), **option)


@check(least=2, helpers=("one", "pairs"))
def ranks_count_workers_only(seat: Seat) -> None:
    helpers = current().helpers
    assert hvd.size() == helpers.context.size - len(helpers.roles.communicators)
    assert helpers.roles.workers[hvd.rank()] == helpers.context.rank
    with pytest.raises(UsageError, match=r"hvd\.init\(algorithm="):
        wrap(Odd(), Layered(helpers.algorithm.group_size + 1, "rank"))
    if seat.size > 2:
        some = hvd.add_process_set([0, 1])
        if seat.rank < 2:
            with pytest.raises(UsageError, match="process_set"):
                model = Odd()
                sgd = torch.optim.SGD(model.parameters(), lr=0.1)
                hvd.DistributedOptimizer(sgd, algorithm=layered(1), process_set=some)
        hvd.barrier()


@check(least=2, helpers=("one", "pairs"))
def plans_grow_with_communicators(seat: Seat) -> None:
    models = []
    for algorithm in (layered(1), AllReduce()):
        model = Odd()
        model.wide.requires_grad_(False)
        optimizer = wrap(model, algorithm)
        for turn in range(6):
            if turn == 2:
                model.wide.requires_grad_(True)
            if turn == 4:
                optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
            step(seat, model, optimizer, turn)
        models.append(model)
    near(*models)
