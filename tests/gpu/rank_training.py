"""DistributedOptimizer with AllReduce on a device, compared with one model on the host on the whole batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from checks.models import MODELS, batch, fill, loss_of, part
from rank_seat import Seat, check
from torch import nn

import sordino.torch as hvd
from sordino.algorithms import AllReduce

ROWS, STEPS = 4, 6


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class Pair:
    """A model on the device, trained by all ranks, and its twin on the host."""

    def __init__(self, seat: Seat, kind: str = "small", **options: object) -> None:
        self.seat, self.turn = seat, 0
        self.model, self.twin = (fill(MODELS[kind]().double(), 3) for _ in range(2))
        self.model.to(seat.device)
        self.optimizer = hvd.DistributedOptimizer(momentum(self.model), self.model.named_parameters(), **options)
        self.reference = momentum(self.twin)

    def backward(self, *arguments: object) -> None:
        self.turn += 1
        whole = batch(ROWS * self.seat.size, self.turn)
        mine = [self.seat.put(one) for one in part(whole, self.seat.rank, self.seat.size)]
        loss_of(self.model, *mine, *arguments).backward()
        loss_of(self.twin, *whole, *arguments).backward()

    def zero(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)
        self.reference.zero_grad(set_to_none=set_to_none)

    def step(self) -> None:
        self.optimizer.step()
        self.reference.step()

    def train(self, *arguments: object, set_to_none: bool = True) -> None:
        for _ in range(STEPS):
            self.zero(set_to_none)
            self.backward(*arguments)
            self.step()

    def check(self, slack: float = 1e-9) -> None:
        for (name, mine), wanted in zip(self.model.named_parameters(), self.twin.parameters()):
            assert mine.device == self.seat.device
            torch.testing.assert_close(mine.detach().cpu(), wanted.detach(), atol=slack, rtol=slack, msg=name)
            self.seat.same(name, mine)


@check(each=(True, False))
def gradients_are_averaged(seat: Seat, set_to_none: bool) -> None:
    for kind in ("small", "tied", "conv"):
        pair = Pair(seat, kind)
        pair.train(set_to_none=set_to_none)
        pair.check()


@check()
def channels_last(seat: Seat) -> None:
    pair = Pair(seat, "conv")
    pair.model.to(memory_format=torch.channels_last)
    pair.train()
    pair.check()
    other = fill(MODELS["conv"]().double(), 3).to(seat.device, memory_format=torch.channels_last)
    pair = Pair(seat, "conv")
    pair.model = other
    pair.optimizer = hvd.DistributedOptimizer(momentum(other), other.named_parameters())
    pair.train()
    pair.check()


@check(each=(True, False))
def unused_parameters(seat: Seat, left: bool) -> None:
    pair = Pair(seat, "branches")
    pair.train(left)
    # Parameters that no rank used must not move, as in the twin, which has no gradients for them.
    pair.check()


@check()
def ranks_use_other_branches(seat: Seat) -> None:
    model = fill(MODELS["branches"]().double(), 3).to(seat.device)
    optimizer = hvd.DistributedOptimizer(momentum(model), model.named_parameters())
    for turn in range(STEPS):
        optimizer.zero_grad()
        x, y = (seat.put(one) for one in batch(ROWS, turn * 10 + seat.rank))
        loss_of(model, x, y, (turn + seat.rank) % 2 == 0).backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        seat.same(name, parameter)


OPTIONS: dict[str, dict[str, object]] = {
    "sum of two passes": {"backward_passes_per_step": 2},
    "predivided": {"gradient_predivide_factor": 2.0},
    "groups": {"groups": 2},
    "small segments": {"algorithm": AllReduce(bucket_bytes=256)},
}


@check(each=OPTIONS)
def options(seat: Seat, which: str) -> None:
    pair = Pair(seat, **OPTIONS[which])
    passes = int(OPTIONS[which].get("backward_passes_per_step", 1))  # type: ignore[call-overload]
    for _ in range(STEPS):
        pair.zero()
        for _ in range(passes):
            pair.backward()
        pair.step()
    pair.check()


@check(each=("fp16", "bf16"))
def compressed(seat: Seat, kind: str) -> None:
    compression = getattr(hvd.Compression, kind, None)
    if compression is None:
        return
    pair = Pair(seat, compression=compression)
    pair.train()
    pair.check(slack=0.05)


@check()
def clipped(seat: Seat) -> None:
    pair = Pair(seat)
    for _ in range(STEPS):
        pair.zero()
        pair.backward()
        pair.optimizer.synchronize()
        for model in (pair.model, pair.twin):
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with pair.optimizer.skip_synchronize():
            pair.optimizer.step()
        pair.reference.step()
    pair.check()


@check()
def double_buffering(seat: Seat) -> None:
    """Its gradients are those of the step before; compared with the same training on the host."""
    trained = seat.twins(lambda: own_batches(seat, algorithm=AllReduce(double_buffering=True)))
    for mine, host in trained:
        torch.testing.assert_close(mine, host, atol=1e-9, rtol=1e-9)


def own_batches(seat: Seat, make: Callable[[nn.Module], torch.optim.Optimizer] = momentum, **options: object):
    model = fill(MODELS["small"]().double(), 3).to(seat.device)
    optimizer = hvd.DistributedOptimizer(make(model), model.named_parameters(), **options)
    for turn in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, *(seat.put(one) for one in batch(ROWS, turn * 10 + seat.rank))).backward()
        optimizer.step()
    optimizer.flush()
    return list(model.parameters())


@check()
def adasum(seat: Seat) -> None:
    if seat.size & (seat.size - 1):
        return
    for mine, host in seat.twins(lambda: own_batches(seat, op=hvd.Adasum)):
        torch.testing.assert_close(mine, host, atol=1e-6, rtol=1e-6)


@check()
def lars(seat: Seat) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return hvd.LARS(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)

    for mine, host in seat.twins(lambda: own_batches(seat, make)):
        torch.testing.assert_close(mine, host, atol=1e-6, rtol=1e-6)


@check(cuda=True, each=("bfloat16", "float16"))
def mixed_precision(seat: Seat, kind: str) -> None:
    """Compared with the same model on the same GPU with the whole batch."""
    models = [fill(MODELS["small"](), 3).to(seat.device) for _ in range(2)]
    wrapped = hvd.DistributedOptimizer(momentum(models[0]), models[0].named_parameters())
    optimizers = [wrapped, momentum(models[1])]
    scalers = [torch.amp.GradScaler("cuda", init_scale=1024.0, enabled=kind == "float16") for _ in range(2)]
    for turn in range(10):
        whole = [one.float() for one in batch(ROWS * seat.size, turn)]
        if turn == 4 and kind == "float16":
            whole[0][0, 0] = float("inf")  # of rank 0: the average gradient is not finite, so all skip the step
        mine = part(whole, seat.rank, seat.size)
        for model, optimizer, scaler, rows in zip(models, optimizers, scalers, (mine, whole)):
            optimizer.zero_grad()
            x, y = (seat.put(one) for one in rows)
            with torch.autocast("cuda", dtype=getattr(torch, kind)):
                loss = ((model(x) - y) ** 2).mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    for (name, mine), twin in zip(models[0].named_parameters(), models[1].parameters()):
        assert bool(mine.isfinite().all())
        seat.same(name, mine)
        torch.testing.assert_close(mine, twin, atol=0.03, rtol=0.03)
    assert scalers[0].get_scale() == scalers[1].get_scale()
    seat.same("scale", scalers[0].get_scale())


@check(cuda=True)
def backward_on_a_side_stream(seat: Seat) -> None:
    pair = Pair(seat)
    side = torch.cuda.Stream(seat.device)
    side.wait_stream(torch.cuda.current_stream(seat.device))
    with torch.cuda.stream(side):
        for _ in range(STEPS):
            pair.zero()
            torch.cuda._sleep(20_000_000)
            pair.backward()
            pair.step()
    torch.cuda.current_stream(seat.device).wait_stream(side)
    pair.check()


@check(least=2)
def the_expected_way(seat: Seat) -> None:
    for set_to_none in (True, False):
        pair = Pair(seat)
        pair.train(set_to_none=set_to_none)
        with seat.goes(seat.reduces):
            pair.train(set_to_none=set_to_none)
