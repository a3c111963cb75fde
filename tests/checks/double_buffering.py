"""Double buffering: its recurrence in float64, checkpoints, and the waiting that it hides."""

from __future__ import annotations

import copy

import pytest
import torch

import sordino.torch as hvd
from checks.odd import OPTIMIZERS, Odd, batch, step, wrap
from checks.registry import Seat, check
from sordino.algorithms import AllReduce
from sordino.errors import StepOrderError, UsageError

LATE = AllReduce(bucket_bytes=200, double_buffering=True)


def gradient(model: Odd, size: int, turn: int) -> list[torch.Tensor]:
    """Return the mean gradient of all ranks, in float64."""
    model.zero_grad()
    for rank in range(size):
        inputs, targets = batch(rank, turn)
        (torch.nn.functional.mse_loss(model(inputs.double()), targets) / size).backward()
    return [p.grad.clone() if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]


@check(least=2, passes=(1, 2), set_to_none=(True, False), compression=("none", "bf16"))
def a_step_uses_the_gradient_before(seat: Seat, passes: int, set_to_none: bool, compression: str) -> None:
    model, reference = Odd(), Odd().double()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.02),
        model.named_parameters(),
        backward_passes_per_step=passes,
        compression=getattr(hvd.Compression, compression),
        algorithm=LATE,
    )
    loose = {"atol": 3e-3, "rtol": 3e-2} if compression == "bf16" else {"atol": 1e-5, "rtol": 1e-4}
    before: list[torch.Tensor] | None = None
    for turn in range(6):
        optimizer.zero_grad(set_to_none=set_to_none)
        for part in range(passes):
            inputs, targets = batch(seat.rank, passes * turn + part)
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        parts = [gradient(reference, seat.size, passes * turn + part) for part in range(passes)]
        now = [sum(values) for values in zip(*parts)]
        with torch.no_grad():
            for value, change in zip(reference.parameters(), before or ()):
                value.sub_(0.02 * change)
        before = now
        for mine, wanted in zip(model.parameters(), reference.parameters()):
            torch.testing.assert_close(mine.double(), wanted.detach(), **loose)
            seat.same("parameter", mine)
    assert model.unused.grad is None
    optimizer.flush()
    optimizer.flush()  # nothing is left to do
    with torch.no_grad():
        for mine, wanted, change in zip(model.parameters(), reference.parameters(), before or ()):
            torch.testing.assert_close(mine.double(), wanted - 0.02 * change, **loose)


@check(least=2)
def a_checkpoint_keeps_the_gradient_under_way(seat: Seat) -> None:
    model = Odd()
    optimizer = wrap(model, LATE)
    for turn in range(3):
        step(seat, model, optimizer, turn)
    state = copy.deepcopy(optimizer.state_dict())
    twin = Odd()
    twin.load_state_dict(model.state_dict())
    resumed = wrap(twin, LATE)
    resumed.load_state_dict(state)
    for turn in range(3, 6):
        step(seat, model, optimizer, turn)
        step(seat, twin, resumed, turn)
        for mine, theirs in zip(model.parameters(), twin.parameters()):
            assert torch.equal(mine, theirs)
    plain = OPTIMIZERS["momentum"](list(Odd().parameters()))
    plain.load_state_dict({key: value for key, value in state.items() if key != "sordino"})


@check(least=2)
def nobody_waits_for_the_gradient_of_now(seat: Seat) -> None:
    """While one rank is late with a step, the other ranks finish theirs."""
    model = Odd()
    optimizer = wrap(model, LATE)
    for turn in range(2):
        step(seat, model, optimizer, turn)
    if seat.rank == 0:
        seat.meet("others", range(1, seat.size))
    step(seat, model, optimizer, 2)
    if seat.rank > 0:
        seat.meet("others", [seat.rank])
    step(seat, model, optimizer, 3)
    seat.same("model", *model.parameters())


@check(least=2)
def late_gradients_survive_changes(seat: Seat) -> None:
    """Late gradients stay correct when parameters are added or unfrozen, when objects are copied, and when gradients
    are clipped."""
    model, extra = Odd(), torch.nn.Parameter(torch.ones(5))
    plain, plain_extra = copy.deepcopy(model), copy.deepcopy(extra)
    optimizer = wrap(model, LATE, OPTIMIZERS["momentum"])
    reference = OPTIMIZERS["momentum"](list(plain.parameters()))
    before: dict[str, torch.Tensor] = {}
    for one in (model, plain):
        one.bias.requires_grad_(False)
    for turn in range(6):
        if turn == 2:
            optimizer.add_param_group({"params": [extra]})
            reference.add_param_group({"params": [plain_extra]})
            for one in (model, plain):
                one.bias.requires_grad_(True)
        if turn == 4:
            model, extra, optimizer = copy.deepcopy((model, extra, optimizer))
        inputs, targets = batch(seat.rank, turn)
        for one, more, its in ((model, extra, optimizer), (plain, plain_extra, reference)):
            its.zero_grad()
            loss = torch.nn.functional.mse_loss(one(inputs), targets)
            (loss + more.square().sum() if turn >= 2 else loss).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        with optimizer.skip_synchronize():
            optimizer.step()
        named = [*plain.named_parameters(), ("extra", plain_extra)]
        now = {name: hvd.allreduce(p.grad, name=f"now.{name}") for name, p in named if p.grad is not None}
        for name, parameter in named:
            parameter.grad = before.get(name)
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.2)
        reference.step()
        before = now
        for mine, (name, wanted) in zip([*model.parameters(), extra], named):
            torch.testing.assert_close(
                mine, wanted, atol=2e-6, rtol=2e-5, msg=lambda text, name=name: f"{name}: {text}"
            )


@check(least=2)
def a_state_of_other_parameters_has_nothing_under_way(seat: Seat) -> None:
    model = Odd()
    optimizer = wrap(model, LATE, OPTIMIZERS["sgd"])
    plain = {key: value for key, value in optimizer.state_dict().items() if key != "sordino"}
    step(seat, model, optimizer, 0)
    model.load_state_dict(Odd().state_dict())
    optimizer.load_state_dict(plain)
    step(seat, model, optimizer, 1)
    for mine, wanted in zip(model.parameters(), Odd().parameters()):
        assert torch.equal(mine, wanted)


@check(least=2)
def a_step_comes_before_anything_else(seat: Seat) -> None:
    model = Odd()
    optimizer = wrap(model, LATE)
    step(seat, model, optimizer, 0)
    inputs, targets = batch(seat.rank, 1)
    torch.nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.synchronize()
    extra = torch.nn.Parameter(torch.ones(2))
    for call in (
        optimizer.flush,
        lambda: optimizer.add_param_group({"params": [extra]}),
        lambda: optimizer.set_backward_passes_per_step(2),
    ):
        with pytest.raises(StepOrderError, match=r"between backward\(\) and step"):
            call()
    with optimizer.skip_synchronize():
        optimizer.step()


@check(least=2)
def a_second_backward_is_refused(seat: Seat) -> None:
    """A second backward would add to the average of the step before, so it raises. A backward in no_sync() before it is
    allowed."""
    model = Odd()
    optimizer = wrap(model, LATE)
    step(seat, model, optimizer, 0)
    inputs, targets = batch(seat.rank, 1)
    with optimizer.no_sync():
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
    torch.nn.functional.mse_loss(model(inputs), targets).backward()
    with pytest.raises(StepOrderError, match="no_sync"):
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()


@check(least=2)
def impossible_double_buffering_is_refused(seat: Seat) -> None:
    with pytest.raises(UsageError, match="double_buffering=3"):
        AllReduce(double_buffering=3)  # type: ignore[arg-type]
    model = Odd()
    with pytest.raises(UsageError, match="Adasum"):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.Adasum, algorithm=LATE)
    optimizer = wrap(model, LATE)
    inputs, targets = batch(seat.rank, 0)
    with pytest.raises(UsageError, match="the previous step"):
        optimizer.step(lambda: 0.0)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.nn.functional.mse_loss(model(inputs), targets)).backward()
    with pytest.raises(UsageError, match="GradScaler"):
        scaler.step(optimizer)
    optimizer.step()
    embedding = torch.nn.Embedding(4, 3, sparse=True)
    late = hvd.DistributedOptimizer(torch.optim.SGD(embedding.parameters(), lr=0.1), algorithm=LATE)
    with pytest.raises(UsageError, match="sparse_as_dense"):
        embedding(torch.tensor([1])).sum().backward()
    late.zero_grad()


@check(least=2)
def each_turn_has_flags_of_its_own(seat: Seat) -> None:
    """One rank never uses a parameter, and the others use it every second step. Its gradient arrives one step later."""
    used, rarely = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([used, rarely], lr=1.0), algorithm=AllReduce(double_buffering=True)
    )
    users = seat.size - 1
    for turn in range(6):
        optimizer.zero_grad()
        (used.sum() + (rarely.sum() if turn % 2 == 0 and seat.rank > 0 else 0)).backward()
        optimizer.synchronize()
        wanted = None if turn % 2 == 0 else users / seat.size
        assert (rarely.grad is None) == (wanted is None), turn
        if wanted is not None:
            torch.testing.assert_close(rarely.grad, torch.full((3,), wanted))
        with optimizer.skip_synchronize():
            optimizer.step()
        done = turn // 2 + turn % 2
        torch.testing.assert_close(rarely.detach(), torch.full((3,), -done * users / seat.size))
        torch.testing.assert_close(used.detach(), torch.full((3,), -float(turn)))


@check(least=2)
def gradients_that_persist_stay_in_shared_memory(seat: Seat) -> None:
    """Two buffers take turns: one has the gradients that are being summed, the other one the averages that are used."""
    parameter = torch.nn.Parameter(torch.zeros(5000))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.0), [("p", parameter)], algorithm=LATE)
    places = []
    for turn in range(12):
        optimizer.zero_grad(set_to_none=False)
        (parameter.sum() * (turn + seat.rank)).backward()
        optimizer.step()
        if turn > 0:
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, torch.full((5000,), turn - 1 + (seat.size - 1) / 2))
            places.append(parameter.grad.data_ptr())
            assert turn < 6 or hvd.is_shared(parameter.grad)
    assert places[-1] != places[-2] and places[-6:] == places[-2:] * 3
