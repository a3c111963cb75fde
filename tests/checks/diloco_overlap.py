"""DiLoCo whose outer gradients are averaged in the background: formulas in float64, state, losses, and waits."""

from __future__ import annotations

import copy
import random
import time
from functools import partial

import pytest
import torch

import sordino.torch as hvd
from checks.agreement import raises
from checks.diloco import Layers, Reference, group_size, same_parameters, sgd, train, train_resumed
from checks.registry import Seat, check
from sordino.algorithms import DiLoCo
from sordino.codecs import TopK
from sordino.errors import PeerLost, UsageError


def wrapped(model: torch.nn.Module, algorithm: DiLoCo, **options: object) -> hvd.DistributedOptimizer:
    return hvd.DistributedOptimizer(sgd(model), model.named_parameters(), algorithm=algorithm, **options)


def outer_of(model: torch.nn.Module, optimizer: hvd.DistributedOptimizer) -> list[torch.Tensor]:
    with optimizer.outer_parameters():
        return [value.detach().clone() for value in model.parameters()]


def equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, some, others))


@check(
    least=2,
    shape=((4, 1, 1), (4, 1, 3), (6, 3, 1), (8, 2, 2)),
    mix=(None, 0.0, 0.75),
    nesterov=(True, False),
    grouped=(False, True),
)
def formulas(seat: Seat, shape: tuple[int, int, int], mix: float | None, nesterov: bool, grouped: bool) -> None:
    """Workers differ in speed, which must not change any result."""
    interval, parts, overlap = shape
    given = {"outer_lr": 0.7, "outer_momentum": 0.9, "nesterov": nesterov, "fragments": parts, "overlap": overlap}
    algorithm = DiLoCo(interval=interval, group_size=group_size(seat) if grouped else 1, mix=mix, **given)
    model, pause = Layers(), random.Random(seat.rank)
    optimizer = wrapped(model, algorithm)
    reference = Reference(seat.size, algorithm, overlap, 0.5 if mix is None else mix)
    for turn in range(2 * interval + overlap + 1):
        time.sleep(pause.random() * 0.002)
        train(seat, model, optimizer, range(turn, turn + 1))
        reference.step(turn)
        reference.compare(seat, model, optimizer)


@check(least=2, mix=(None, 0.25))
def a_share_of_the_own_parameters_can_stay_without_overlap(seat: Seat, mix: float | None) -> None:
    algorithm = DiLoCo(interval=2, outer_lr=0.7, outer_momentum=0.9, mix=mix)
    model, reference = Layers(), Reference(seat.size, algorithm, 0, 0.0 if mix is None else mix)
    optimizer = wrapped(model, algorithm)
    for turn in range(5):
        train(seat, model, optimizer, range(turn, turn + 1))
        reference.step(turn)
        reference.compare(seat, model, optimizer)


@check(least=2)
def one_fragment_without_overlap_is_an_all_reduce(seat: Seat) -> None:
    """It averages the changes of all parameters in one tensor, bit for bit, in float32."""
    algorithm = DiLoCo(interval=3, outer_lr=0.7, outer_momentum=0.9, fragments=1, overlap=0)
    model, own = Layers(dtype=torch.float32), Layers(dtype=torch.float32)
    optimizer, alone = wrapped(model, algorithm), sgd(own)
    outer = torch.nn.utils.parameters_to_vector(own.parameters()).detach().clone()
    momentum = torch.zeros_like(outer)
    for turn in range(9):
        train(seat, model, optimizer, range(turn, turn + 1))
        train(seat, own, alone, range(turn, turn + 1))
        if turn % 3 == 2:
            change = torch.nn.utils.parameters_to_vector(own.parameters()).detach() - outer
            mean = hvd.allreduce(change, name=f"by hand.{turn}")
            momentum.mul_(0.9).add_(mean)
            outer.add_(mean, alpha=0.7).add_(momentum, alpha=0.7 * 0.9)
            with torch.no_grad():
                torch.nn.utils.vector_to_parameters(outer.clone(), own.parameters())
        assert equal(list(model.parameters()), list(own.parameters())), turn


@check(least=2)
def no_rank_waits_for_a_slow_one_before_the_outer_step(seat: Seat) -> None:
    algorithm = DiLoCo(interval=4, outer_lr=0.7, outer_momentum=0.9, overlap=3)
    model, reference = Layers(), Reference(seat.size, algorithm, 3, 0.5)
    optimizer = wrapped(model, algorithm)
    for turn in range(7):
        if turn == 3 and seat.rank == seat.last:
            seat.meet("ahead", [0])  # rank 0 has begun the exchange, and taken two more steps
            time.sleep(0.1)  # rank 0 waits now
        if turn == 6 and seat.rank == 0:
            seat.meet("ahead", [0])
        train(seat, model, optimizer, range(turn, turn + 1))
        reference.step(turn)
    reference.compare(seat, model, optimizer)


@check(least=2, fragments=(1, 2))
def a_checkpoint_at_each_step(seat: Seat, fragments: int) -> None:
    """Training that resumes is the same, bit for bit, also while an exchange is in flight."""
    algorithm = DiLoCo(interval=8, outer_lr=0.7, outer_momentum=0.9, fragments=fragments, overlap=2)
    model = Layers()
    optimizer, saved, pending = wrapped(model, algorithm), [], []
    for turn in range(20):
        if 7 <= turn < 16:
            saved.append((turn, copy.deepcopy((model.state_dict(), optimizer.state_dict()))))
            if "pending" in saved[-1][1][1]["sordino"]:
                pending.append(turn)
                seat.same("pending", *next(iter(saved[-1][1][1]["sordino"]["pending"].values())))
        train(seat, model, optimizer, range(turn, turn + 1))
    assert pending == ([8, 9] if fragments == 1 else [8, 9, 12, 13])
    for turn, state in saved:
        other = Layers(seed=9)
        resumed = wrapped(other, algorithm)
        train(seat, other, resumed, range(17))  # so that another exchange is in flight when the state is loaded
        other.load_state_dict(state[0])
        resumed.load_state_dict(state[1])
        train(seat, other, resumed, range(turn, 20))
        assert equal(list(model.parameters()), list(other.parameters())), turn
        assert equal(outer_of(model, optimizer), outer_of(other, resumed)), turn


@check(least=2, overlap=(0, 1))
def a_state_can_be_loaded_with_another_overlap(seat: Seat, overlap: int) -> None:
    """An exchange that should have ended by now ends after the next step."""
    given = {"interval": 4, "outer_lr": 0.7, "outer_momentum": 0.9}
    model = Layers()
    optimizer = wrapped(model, DiLoCo(overlap=3, **given))
    train(seat, model, optimizer, range(6))  # two steps after the exchange has begun
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(seat, model, optimizer, range(6, 7))
    shorter = DiLoCo(overlap=overlap, mix=0.5, **given)
    other, _ = train_resumed(seat, partial(wrapped, algorithm=shorter), state, range(6, 7))
    assert same_parameters(model, other)


@check(least=2)
def what_is_in_flight_at_the_end(seat: Seat) -> None:
    """An exchange in flight does not count for the outer parameters until flush(). Without flush(), nothing waits for
    it."""
    algorithm = DiLoCo(interval=4, outer_lr=0.7, outer_momentum=0.9, overlap=3)
    model, reference = Layers(), Reference(seat.size, algorithm, 3, 0.5)
    optimizer = wrapped(model, algorithm)
    for turn in range(5):
        train(seat, model, optimizer, range(turn, turn + 1))
        reference.step(turn)
    reference.compare(seat, model, optimizer)  # the outer parameters are those from the start
    mean = hvd.average_parameters(model)
    for name, value in mean.items():
        workers = [one.state_dict()[name] for one, _ in reference.workers]
        torch.testing.assert_close(value, torch.stack(workers).mean(0), atol=1e-12, rtol=1e-11)
    optimizer.flush()
    reference.outer_step()
    reference.compare(seat, model, optimizer)
    optimizer.flush()
    reference.compare(seat, model, optimizer)
    for turn in range(5, 9):
        train(seat, model, optimizer, range(turn, turn + 1))
        reference.step(turn)
    reference.compare(seat, model, optimizer)  # the next exchange is in flight when the ranks leave


@check(least=2)
def a_failed_exchange_is_no_outer_step(seat: Seat) -> None:
    """A rank that has not begun the exchange leaves. The others raise where they would take the outer step."""
    model = Layers()
    optimizer = wrapped(model, DiLoCo(interval=4, outer_lr=0.7, outer_momentum=0.9, overlap=2))
    train(seat, model, optimizer, range(3))
    before = outer_of(model, optimizer)
    if seat.rank == seat.last:
        seat.meet("begun", range(seat.last))
        hvd.shutdown()
    else:
        train(seat, model, optimizer, range(3, 5))
        seat.meet("begun", range(seat.last))
        own = [value.detach().clone() for value in model.parameters()]
        optimizer.zero_grad()
        for value in model.parameters():
            value.grad = torch.zeros_like(value)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        for attempt in (optimizer.step, optimizer.state_dict, optimizer.flush):
            with pytest.raises(PeerLost):
                attempt()
            assert equal(own, list(model.parameters()))
            assert equal(before, outer_of(model, optimizer))
    seat.meet("all have failed")
    hvd.shutdown()
    if seat.transport == "processes":
        hvd.init()


@check(least=2)
def parameters_in_16_bits(seat: Seat) -> None:
    """Outer parameters and changes are in float32; the mix is rounded once."""
    model = torch.nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    torch.nn.init.constant_(model.weight, 256.0)  # the next value in bfloat16 is 258
    sgd = torch.optim.SGD(model.parameters(), lr=2.0)
    algorithm = DiLoCo(interval=2, outer_lr=0.25, outer_momentum=0.0, overlap=1, mix=0.25)
    optimizer = hvd.DistributedOptimizer(sgd, algorithm=algorithm)
    for _ in range(3):
        model.weight.grad = torch.full_like(model.weight, -1.0)
        optimizer.step()
    # The change is 4 after two steps, so the outer parameter becomes 257. The third step has made the own one 262.
    assert optimizer.state_dict()["sordino"]["outer"][0].item() == 257.0
    assert model.weight.item() == 258.0  # 0.25 * 262 + 0.75 * 257 = 258.25


@check(least=2)
def two_widths_and_frozen_parameters(seat: Seat) -> None:
    """Parameters of several dtypes are in one exchange. Frozen ones, and a model without trained parameters, are in
    none."""
    model = torch.nn.ParameterList([torch.full((3,), 1.0), torch.full((2, 2), 2.0).double(), torch.full((5,), 3.0)])
    model[2].requires_grad_(False)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    algorithm = DiLoCo(interval=2, outer_lr=0.5, outer_momentum=0.0, overlap=1, mix=0.0)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), algorithm=algorithm)
    for _ in range(3):
        for value in model[:2]:
            value.grad = torch.full_like(value, float(seat.rank))
        optimizer.step()
    for value, start in zip(model, (1.0, 2.0, 3.0)):
        wanted = start - 0.5 * (seat.size - 1) if start < 3 else start  # half of the mean of two steps
        torch.testing.assert_close(value, torch.full_like(value, wanted))
    assert [one.dtype for one in optimizer.state_dict()["sordino"]["outer"]] == [torch.float64, torch.float32]
    frozen = torch.nn.Linear(2, 2).requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(frozen.parameters(), lr=1.0), algorithm=algorithm)
    for _ in range(5):
        optimizer.step()
    optimizer.flush()


@check(least=2)
def buffers_are_averaged_where_the_last_exchange_begins(seat: Seat) -> None:
    model = Layers()
    algorithm = DiLoCo(interval=4, outer_lr=0.7, outer_momentum=0.9, fragments=2, overlap=1, buffers="average")
    optimizer = wrapped(model, algorithm, named_buffers=model.named_buffers())
    for turn in range(8):
        model.seen.fill_(float(seat.rank))
        train(seat, model, optimizer, range(turn, turn + 1))
        wanted = (seat.size - 1) / 2 if turn % 4 == 3 else seat.rank
        torch.testing.assert_close(model.seen, torch.full((3,), float(wanted), dtype=torch.float64))


@check()
def settings_that_cannot_be(seat: Seat) -> None:
    raises(UsageError, "must be at least 0", DiLoCo, overlap=-1)
    raises(UsageError, "must be below interval / fragments, here 4", DiLoCo, interval=8, fragments=2, overlap=4)
    raises(UsageError, "must be at least 0 and below 1", DiLoCo, mix=1.0)
    raises(UsageError, "must be at least 0 and below 1", DiLoCo, mix=-0.5)
    assert [one.own_share for one in (DiLoCo(), DiLoCo(overlap=1), DiLoCo(overlap=1, mix=0.0))] == [0.0, 0.5, 0.0]
    assert not DiLoCo().traits.late and DiLoCo(overlap=1).traits.late


@check(least=2, before=(None, TopK(1.0, 32, 32)), twice=(False, True))
def a_state_can_be_loaded_with_another_codec(seat: Seat, before: TopK | None, twice: bool) -> None:
    """An exchange is in flight: without a codec the state has the mean, with a codec this rank's own changes."""
    given = {"interval": 4, "outer_lr": 0.7, "outer_momentum": 0.9, "overlap": 3}
    exact = TopK(1.0, 32, 32)  # sends all values, in float32
    model = Layers()
    optimizer = wrapped(model, DiLoCo(compression=before, **given))
    train(seat, model, optimizer, range(5))
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(seat, model, optimizer, range(5, 9))
    algorithm = DiLoCo(compression=exact if before is None else None, **given)
    if twice:
        other, resumed = train_resumed(seat, partial(wrapped, algorithm=algorithm), state, range(5, 5))
        state = copy.deepcopy((other.state_dict(), resumed.state_dict()))
        del other, resumed
    other, resumed = train_resumed(seat, partial(wrapped, algorithm=algorithm), state, range(5, 9))
    for mine, wanted in zip(outer_of(other, resumed), outer_of(model, optimizer)):
        seat.same("outer", mine)
        torch.testing.assert_close(mine, wanted, atol=1e-5, rtol=1e-5)
