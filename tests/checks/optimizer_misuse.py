"""Calls in the wrong order, ranks with different models, ranks with different numbers of batches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import sordino.torch as hvd
from checks.agreement import raises
from checks.models import batch, loss_of, make_model
from checks.registry import Seat, check
from checks.training import ROWS, Twins, sgd
from sordino.algorithms import LocalSGD
from sordino.errors import LayoutMismatch, UsageError
from sordino.fingerprint import rank_list


@check(least=2)
def zero_grad_after_backward(seat: Seat) -> None:
    """Final gradients are thrown away, as with DDP. Gradients in flight would be lost, so the call raises."""
    twins = Twins(seat)
    twins.train(2)
    for set_to_none in (True, False):
        twins.zero()
        twins.backward()
        twins.zero(set_to_none=set_to_none)
        twins.backward()
        twins.check_gradients()
        twins.step()
    twins.train(1)
    twins.check()
    twins = Twins(seat, algorithm=LocalSGD(1, seat.size))
    twins.train(1)
    twins.zero()
    twins.backward()
    raises(AssertionError, "zero_grad", twins.optimizer.zero_grad)
    raises(hvd.HorovodInternalError, "race", twins.optimizer.zero_grad)
    twins.step()
    twins.train(1)
    twins.check()


@check(least=2)
def more_backward_passes_than_promised(seat: Seat) -> None:
    for passes in (1, 2):
        twins = Twins(seat, backward_passes_per_step=passes, op=hvd.Sum)
        twins.train(0)
        for _ in range(2):
            twins.zero()
            for _ in range(passes):
                twins.backward()
            mine, _ = twins.batches()
            raises(AssertionError, "backward_passes_per_step", loss_of(twins.model, *mine).backward)
            # Some gradients have grown in flight: throw them away and continue.
            twins.optimizer.synchronize()
            with twins.optimizer.skip_synchronize():
                twins.optimizer.step()
            hvd.broadcast_parameters(twins.model.state_dict(), 0)
            hvd.broadcast_optimizer_state(twins.optimizer, 0)
        twins.zero()
        for _ in range(passes):
            twins.backward()
        twins.step()
        for parameter in twins.model.parameters():
            seat.same("parameter", parameter)


@check(least=2)
def changing_the_plan_amid_a_step(seat: Seat) -> None:
    twins = Twins(seat)
    twins.train(1)
    twins.zero()
    twins.backward()
    fresh = {"params": [nn.Parameter(torch.ones(2, dtype=torch.float64))]}
    raises(AssertionError, "add_param_group", twins.optimizer.add_param_group, fresh)
    raises(AssertionError, "set_backward", twins.optimizer.set_backward_passes_per_step, 2)
    twins.step()
    twins.check()


@check()
def step_after_synchronize_reduces_once(seat: Seat) -> None:
    """With op=Sum a second reduction would change the result."""
    weight = nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.Sum)
    for turn in range(3):
        optimizer.zero_grad(set_to_none=turn == 1)
        weight.sum().backward()
        optimizer.synchronize()
        optimizer.synchronize()
        optimizer.step()
        assert weight.grad.tolist() == [seat.size] * 3
        assert weight.tolist() == [-seat.size * (turn + 1)] * 3


# By case: the layers of the odd rank instead of Linear(4, 3) and Linear(3, 2), and the tensor that the error names.
DIFFERENT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "shape": (lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 5)), "1.weight"),
    "dtype": (lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2).double()), "1.weight"),
    "fewer": (lambda: nn.Sequential(nn.Linear(4, 3)), "1.weight"),
    "more": (lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2), nn.Linear(2, 2)), "2.weight"),
    "names": (lambda: nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), "1.weight"),
    "order": (lambda: nn.ModuleDict({"1": nn.Linear(3, 2), "0": nn.Linear(4, 3)}), "1.weight"),
}


@check(least=2, what=DIFFERENT, op=("Average", "Adasum"), who=("the first", "the last"))
def different_models(seat: Seat, what: str, op: str, who: str) -> None:
    """All ranks raise LayoutMismatch, which names the ranks and the first tensor that differs."""
    make, tensor = DIFFERENT[what]
    odd = seat.rank == (0 if who == "the first" else seat.last)
    model = make() if odd else nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    try:
        hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), op=getattr(hvd, op)
        )
    except LayoutMismatch as error:
        assert isinstance(error, ValueError)
        assert tensor in str(error), error
        one = 0 if who == "the first" else seat.last
        for ranks in ([one], [rank for rank in range(seat.size) if rank != one]):
            assert f"on {rank_list(ranks)}" in str(error), error
        seat.same("error", str(error))
    else:
        raise AssertionError("the models differ")
    twins = Twins(seat)  # the world stays usable
    twins.train(1)
    twins.check()


@check(order=("forwards", "backwards"), set_to_none=(True, False))
def uneven_batches_and_join(seat: Seat, order: str, set_to_none: bool) -> None:
    """Ranks run out of batches one after the other; the mean always divides by the number of all ranks."""
    counts = [2 * (rank if order == "forwards" else seat.last - rank) for rank in range(seat.size)]
    model, twin = make_model("small", 3), make_model("small", 3)
    optimizer, reference = hvd.DistributedOptimizer(sgd(model), model.named_parameters()), sgd(twin)
    for turn in range(max(counts)):
        if turn < counts[seat.rank]:
            optimizer.zero_grad(set_to_none=set_to_none)
            loss_of(model, *batch(ROWS, 100 * seat.rank + turn)).backward()
            optimizer.step()
        reference.zero_grad()
        for rank, count in enumerate(counts):
            if turn < count:
                (loss_of(twin, *batch(ROWS, 100 * rank + turn)) / seat.size).backward()
        reference.step()
    last = hvd.join()
    assert seat.size == 1 or last == (seat.last if order == "forwards" else 0)
    hvd.broadcast_parameters(model.state_dict(), root_rank=last)
    hvd.broadcast_optimizer_state(optimizer, root_rank=last)
    for mine, wanted in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(mine, wanted, atol=1e-11, rtol=1e-11)
        seat.same("parameter", mine)
    optimizer.zero_grad()
    loss_of(model, *batch(ROWS, seat.rank)).backward()
    optimizer.step()
    for parameter in model.parameters():
        seat.same("after", parameter)


@check(least=2)
def join_before_the_first_step(seat: Seat) -> None:
    """One rank has no batch in the first epoch, and has some in the second."""
    model = make_model("small", 3)
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
    for epoch in range(2):
        if seat.rank > 0 or epoch == 1:
            optimizer.zero_grad()
            loss_of(model, *batch(ROWS, seat.rank)).backward()
            optimizer.step()
        last = hvd.join()
        hvd.broadcast_parameters(model.state_dict(), last)
        hvd.broadcast_optimizer_state(optimizer, last)
    for parameter in model.parameters():
        seat.same("parameter", parameter)


@check(least=2)
def complex_parameters(seat: Seat) -> None:
    weight = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    raises(UsageError, "complex", hvd.DistributedOptimizer, torch.optim.SGD([weight], lr=0.1))
