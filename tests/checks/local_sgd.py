"""Hierarchical local SGD: against AllReduce, against itself without shards, and against float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import sordino.torch as hvd
from checks.odd import OPTIMIZERS, Odd, batch, divisors, near, same_models, step, train, twin_of, wrap
from checks.registry import Seat, check
from sordino.algorithms import AdaptiveInterval, AllReduce, LocalSGD
from sordino.errors import UsageError


@check(least=2, exchange=("sharded", "allreduce"), name=tuple(OPTIMIZERS))
def one_group_is_allreduce(seat: Seat, exchange: str, name: str) -> None:
    local = train(seat, LocalSGD(group_size=seat.size, exchange=exchange, bucket_bytes=200), 6, OPTIMIZERS[name])
    near(local, train(seat, AllReduce(), 6, OPTIMIZERS[name]))
    for parameter in local.parameters():
        seat.same("parameter", parameter)


@check(least=2, exchange=("sharded", "allreduce"))
def plain_sgd_with_interval_one_is_allreduce(seat: Seat, exchange: str) -> None:
    wanted = train(seat, AllReduce(), 6, OPTIMIZERS["sgd"])
    for k in divisors(seat.size):
        near(train(seat, LocalSGD(1, k, exchange), 6, OPTIMIZERS["sgd"]), wanted)


def reference(size: int, algorithm: LocalSGD, steps: int, lr: float) -> list[list[torch.Tensor]]:
    """Return the parameters of every group after plain SGD, in float64."""
    models = [Odd().double() for _ in range(size // algorithm.group_size)]
    then = [p.detach().clone() for p in models[0].parameters()]
    start = algorithm.start if isinstance(algorithm.start, int) else 0
    for turn in range(steps):
        gradients = []
        for group, model in enumerate(models):
            model.zero_grad()
            for rank in range(group * algorithm.group_size, (group + 1) * algorithm.group_size):
                inputs, targets = batch(rank, turn)
                (torch.nn.functional.mse_loss(model(inputs.double()), targets) / algorithm.group_size).backward()
            gradients.append([p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()])
        if turn < start:
            gradients = [[sum(parts) / len(models) for parts in zip(*gradients)]] * len(models)
        with torch.no_grad():
            for model, own in zip(models, gradients):
                for parameter, gradient in zip(model.parameters(), own):
                    parameter.sub_(lr * gradient)
            local = turn + 1 - start
            if local <= 0:
                then = [p.detach().clone() for p in models[0].parameters()]
            elif local % algorithm.interval == 0:
                for k, parts in enumerate(zip(*(model.parameters() for model in models))):
                    moved = sum(part - then[k] for part in parts)
                    value = then[k] + (moved if algorithm.aggregate == "gradients" else moved / len(models))
                    for part in parts:
                        part.copy_(value)
                    then[k] = value.clone()
    return [[p.detach() for p in model.parameters()] for model in models]


@check(least=2, exchange=("sharded", "allreduce"), start=("immediate", 0, 3), aggregate=("parameters", "gradients"))
def groups_follow_the_formula(seat: Seat, exchange: str, start: Any, aggregate: str) -> None:
    for k in divisors(seat.size):
        algorithm = LocalSGD(2, k, exchange, start, aggregate)
        model = train(seat, algorithm, 8, lambda p: torch.optim.SGD(p, lr=0.02))
        wanted = reference(seat.size, algorithm, 8, 0.02)[seat.rank // k]
        for parameter, value in zip(model.parameters(), wanted):
            torch.testing.assert_close(parameter.double(), value, atol=1e-5, rtol=1e-4)


@check(least=2)
def groups_part_when_the_rate_decays(seat: Seat) -> None:
    model = Odd()
    optimizer = wrap(model, LocalSGD(3, start="decay"), OPTIMIZERS["sgd"])
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [4])
    apart = []
    for turn in range(9):
        step(seat, model, optimizer, turn)
        scheduler.step()
        apart.append(hvd.consensus_distance(model) > 1e-6)
    # Step 4 has the lower rate and is the last common step; step 7 averages the models.
    assert apart == [False] * 5 + [True, True, False, True]


@check(least=2)
def an_interval_follows_the_loss(seat: Seat) -> None:
    model = Odd()
    optimizer = wrap(model, LocalSGD(10, adaptive=AdaptiveInterval(block=2)), OPTIMIZERS["sgd"])
    losses, wanted = [8.0, 8.0, 6.0, 2.0, 7.0, 0.3], [10]
    seen = []
    for turn, loss in enumerate(losses):
        for k in range(2):
            step(seat, model, optimizer, 2 * turn + k)
        optimizer.report_metric(loss + (seat.rank - (seat.size - 1) / 2) / 10)
        seen.append(optimizer.state_dict()["sordino"]["interval"])
        if turn > 0:
            ratio = math.ceil(10 * math.sqrt(loss / losses[0]))
            wanted.append(ratio if ratio < wanted[-1] else max(1, wanted[-1] // 2))
    assert seen == wanted


@check(least=2)
def impossible_local_sgd_is_refused(seat: Seat) -> None:
    for options, text in (
        ({"interval": 0}, r"LocalSGD\(interval=0\)"),
        ({"exchange": "pigeon"}, "exchange"),
        ({"start": -1}, "start"),
        ({"start": "soon"}, "start"),
        ({"aggregate": "votes"}, "aggregate"),
        ({"adaptive": 3}, "adaptive"),
    ):
        with pytest.raises(UsageError, match=text):
            LocalSGD(**options)
    with pytest.raises(UsageError, match="does not divide"):
        wrap(Odd(), LocalSGD(group_size=seat.size + 1))
    model = Odd()
    with pytest.raises(
        UsageError, match=r"needs an element-wise optimizer.*SGD, Adam.*If LARS is, too.*exchange=\"allreduce\""
    ):
        wrap(model, LocalSGD(group_size=seat.size), lambda p: hvd.LARS(p, lr=0.1))
    optimizer = wrap(model, LocalSGD(group_size=seat.size))
    with pytest.raises(UsageError, match="report_metric"):
        optimizer.report_metric(1.0)


@check(least=2, exchange=("sharded", "allreduce"))
def an_infinite_gradient_stops_its_group_alone(seat: Seat, exchange: str) -> None:
    k = divisors(seat.size)[-2]
    model = torch.nn.Linear(64, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = wrap(model, LocalSGD(1, k, exchange), lambda p: torch.optim.SGD(p, lr=1.0))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    inputs = torch.ones(1, 64)
    if seat.rank == 0:
        inputs[0, 63] = math.inf
    scaler.scale(model(inputs).sum()).backward()
    if optimizer._strategy.partial_state:
        with pytest.raises(UsageError, match="unscale"):
            scaler.step(optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.zeros(1))
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == (2.0 if seat.rank < k else 4.0)
    # All groups but the first have stepped by -1, and all have taken the mean.
    groups = seat.size // k
    torch.testing.assert_close(model.weight.detach(), torch.full((1, 64), -(groups - 1) / groups))


@check(least=2)
def a_scaler_takes_sparse_gradients(seat: Seat) -> None:
    """The second step, which all ranks leave out, has an infinite gradient on rank 0."""
    model = torch.nn.Embedding(4, 2, sparse=True)
    torch.nn.init.zeros_(model.weight)
    optimizer = wrap(model, LocalSGD(1, seat.size, "allreduce"), lambda p: torch.optim.SGD(p, lr=1.0))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for factor in (1.0, math.inf if seat.rank == 0 else 1.0):
        optimizer.zero_grad()
        scaler.scale(model(torch.tensor([1, 1, 3])).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    torch.testing.assert_close(model.weight.detach()[:, 0], torch.tensor([0.0, -2, 0, -1]))


@check(least=2, exchange=("sharded", "allreduce"))
def the_distance_is_that_of_the_models(seat: Seat, exchange: str) -> None:
    for k in divisors(seat.size):
        model = Odd()
        optimizer = wrap(model, LocalSGD(100, k, exchange, log_distance=2), OPTIMIZERS["sgd"])
        for turn in range(5):
            step(seat, model, optimizer, turn)
            if turn == 3:
                wanted = hvd.consensus_distance(model)
        steps, found = zip(*optimizer.distances)
        assert steps == (2, 4)
        assert found[1] == pytest.approx(wanted, rel=1e-4, abs=1e-6)
        assert (found[1] > 0) == (k < seat.size)
        seat.same("distance", found)


@check(least=2, exchange=("sharded", "allreduce"))
def buffers_are_averaged_with_the_models(seat: Seat, exchange: str) -> None:
    buffers = {"mean": torch.zeros(3), "count": torch.zeros(2, dtype=torch.float64)}
    for k in divisors(seat.size):
        model = Odd()
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS["sgd"](list(model.parameters())),
            model.named_parameters(),
            algorithm=LocalSGD(2, k, exchange, buffers="average"),
            named_buffers=buffers.items(),
        )
        for turn in range(4):
            for buffer in buffers.values():
                buffer.fill_(seat.rank + turn)
            step(seat, model, optimizer, turn)
            mine = turn + (seat.size - 1) / 2 if turn % 2 == 1 else turn + seat.rank
            for buffer in buffers.values():
                torch.testing.assert_close(buffer, torch.full_like(buffer, mine))


@check(least=2)
def an_interval_is_looked_at_once_in_a_block(seat: Seat) -> None:
    """The interval is reconsidered once per block, however often a loss is reported. A loss that is NaN, infinite or
    not above 0 is ignored. A lower rate lets the interval grow as the square root. A loaded state continues with all of
    this."""
    algorithm = LocalSGD(16, adaptive=AdaptiveInterval(block=3))
    model = Odd()
    optimizer = wrap(model, algorithm, OPTIMIZERS["sgd"])
    # The first loss that counts is 8; the others are at the ends of blocks.
    losses = [math.nan, 8.0, 1.0, 1.0, 4.0, 0.1, 0.1, math.inf, -1.0, 2.0, 0.1, 0.1, 1.0, 0.1]
    wanted = [16, 16, 16, 16, 12, 12, 12, 12, 12, 8, 8, 8, 6, 6]
    seen = []
    for turn, loss in enumerate(losses):
        step(seat, model, optimizer, turn)
        if turn == 5:
            model, optimizer = twin_of(model, optimizer, algorithm, OPTIMIZERS["sgd"])
        optimizer.report_metric(loss)
        seen.append(optimizer.state_dict()["sordino"]["interval"])
    assert seen == wanted
    optimizer.param_groups[0]["lr"] /= 4
    for turn in range(len(losses), len(losses) + 3):
        step(seat, model, optimizer, turn)
    optimizer.report_metric(0.5)  # 16 * sqrt(4 / 16) = 8 is not less than 6, so half of 6
    assert optimizer.state_dict()["sordino"]["interval"] == 3
    optimizer.param_groups[0]["lr"] = 0.0
    for turn in range(3):
        step(seat, model, optimizer, turn)
    optimizer.report_metric(0.125)  # 16 * sqrt(1 / 64)
    assert optimizer.state_dict()["sordino"]["interval"] == 2


@check(least=2)
def those_outside_a_set_may_leave_steps_out(seat: Seat) -> None:
    alone = hvd.add_process_set([0])
    model = torch.nn.Linear(3, 1, bias=False)
    before = model.weight.detach().clone()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        model.named_parameters(),
        process_set=alone,
        algorithm=LocalSGD(1, adaptive=AdaptiveInterval(block=1), log_distance=1),
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(torch.ones(1, 3)).sum()).backward()
    model.weight.grad[0, 0] = math.inf
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0 and torch.equal(model.weight.detach(), before)
    optimizer.report_metric(1.0)
    optimizer.flush()
    assert optimizer.distances == ([(1, 0.0)] if seat.rank == 0 else [])


@check(least=2, exchange=("sharded", "allreduce"), aggregate=("parameters", "gradients"))
def parameters_that_were_replaced_are_averaged(seat: Seat, exchange: str, aggregate: str) -> None:
    algorithm = LocalSGD(2, divisors(seat.size)[-2], exchange, aggregate=aggregate)
    plain, replaced = Odd(), Odd()
    optimizers = [wrap(model, algorithm, lambda p: torch.optim.SGD(p, lr=0.01)) for model in (plain, replaced)]
    for turn in range(6):
        for model, optimizer in zip((plain, replaced), optimizers):
            step(seat, model, optimizer, turn)
        assert same_models(plain, replaced)
        for parameter in replaced.parameters():
            parameter.data = parameter.data.clone()


@check(least=2)
def groups_of_one_do_not_watch_gradients(seat: Seat) -> None:
    model = Odd()
    optimizer = wrap(model, LocalSGD(2, start=2), OPTIMIZERS["sgd"])
    watched = []
    for turn in range(3):
        step(seat, model, optimizer, turn)
        watched.append(any(parameter._post_accumulate_grad_hooks for parameter in model.parameters()))
    assert watched == [True, False, False]
