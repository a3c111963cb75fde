"""Every optimizer of torch, wrapped, trains like one process on the whole batch."""

from __future__ import annotations

import torch

import sordino.torch as hvd
from checks.models import EVERY, MANY, loss_of, model_for
from checks.registry import Seat, check
from checks.training import Twins


@check(label=EVERY)
def trains_as_one_process(seat: Seat, label: str) -> None:
    twins = Twins(seat, model_for(label), EVERY[label])
    assert isinstance(twins.optimizer, torch.optim.Optimizer)
    twins.train(5)
    twins.check(1e-8)


@check(label=MANY)
def with_options(seat: Seat, label: str) -> None:
    twins = Twins(seat, "small", MANY[label])
    twins.train(5)
    twins.check(1e-9)


@check(variant=("foreach", "fused", "maximize"), kind=("Adam", "SGD"))
def torchs_own_variants(seat: Seat, variant: str, kind: str) -> None:
    twins = Twins(seat, "small", lambda m: getattr(torch.optim, kind)(m.parameters(), lr=0.01, **{variant: True}))
    twins.train(4)
    twins.check(1e-9)


def lbfgs(**options: object):
    # The loss must not decide when to stop, as it differs between ranks.
    return lambda model: torch.optim.LBFGS(
        model.parameters(), lr=0.5, max_iter=4, tolerance_grad=0, tolerance_change=0, history_size=5, **options
    )


@check()
def lbfgs_evaluates_its_closure_many_times(seat: Seat) -> None:
    twins = Twins(seat, "small", lbfgs())
    calls = []
    for _ in range(3):
        mine, whole = twins.batches()

        def closure(model=twins.model, optimizer=twins.optimizer, data=mine):
            optimizer.zero_grad()
            loss = loss_of(model, *data)
            loss.backward()
            calls.append(model)
            return loss

        result = twins.optimizer.step(closure)
        assert isinstance(result, torch.Tensor)
        twins.reference.step(lambda data=whole: closure(twins.twin, twins.reference, data))
    assert calls.count(twins.model) == calls.count(twins.twin) > 6
    twins.check(1e-8)


@check()
def lbfgs_with_a_line_search_on_the_common_loss(seat: Seat) -> None:
    twins = Twins(seat, "small", lbfgs(line_search_fn="strong_wolfe"))
    for _ in range(3):
        mine, whole = twins.batches()

        def closure(mine=mine) -> torch.Tensor:
            twins.optimizer.zero_grad()
            loss = loss_of(twins.model, *mine)
            loss.backward()
            return hvd.allreduce(loss.detach())

        def alone(whole=whole) -> torch.Tensor:
            twins.reference.zero_grad()
            loss = loss_of(twins.twin, *whole)
            loss.backward()
            return loss.detach()

        twins.optimizer.step(closure)
        twins.reference.step(alone)
    twins.check(1e-6)


@check()
def closures_of_ordinary_optimizers(seat: Seat) -> None:
    twins = Twins(seat, "small", MANY["momentum"])
    for _ in range(4):
        mine, whole = twins.batches()

        def closure(model, optimizer, data) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, *data)
            loss.backward()
            return loss

        loss = twins.optimizer.step(lambda data=mine: closure(twins.model, twins.optimizer, data))
        assert loss.item() > 0
        twins.reference.step(lambda data=whole: closure(twins.twin, twins.reference, data))
    twins.check()


@check(dtype=(torch.float32, torch.bfloat16, torch.float16))
def parameters_of_other_dtypes(seat: Seat, dtype: torch.dtype) -> None:
    twins = Twins(seat, "small", lambda m: torch.optim.SGD(m.parameters(), lr=0.1), dtype=dtype)
    twins.train(3)
    twins.check(1e-5 if dtype == torch.float32 else 5e-2)


@check()
def parameters_of_mixed_dtypes(seat: Seat) -> None:
    """Each segment has one dtype."""
    weights = [
        torch.nn.Parameter(torch.ones(5, dtype=dtype)) for dtype in (torch.float32, torch.float64, torch.bfloat16) * 2
    ]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weights, lr=1.0))
    for _ in range(3):
        optimizer.zero_grad(set_to_none=False)
        sum((weight * (seat.rank + i)).sum().double() for i, weight in enumerate(weights)).backward()
        optimizer.step()
        for i, weight in enumerate(weights):
            mean = sum(rank + i for rank in range(seat.size)) / seat.size
            torch.testing.assert_close(weight.grad, torch.full_like(weight, mean))
            seat.same("weight", weight)


@check()
def without_names(seat: Seat) -> None:
    twins = Twins(seat, "small", MANY["two groups"], named_parameters=None)
    twins.train(3)
    twins.check()


@check()
def a_long_run_stays_equal(seat: Seat) -> None:
    """The run has more steps than there are tags and slots, which then repeat."""
    twins = Twins(seat, "small", lambda m: torch.optim.SGD(m.parameters(), lr=0.01))
    twins.train(150, set_to_none=False)
    twins.check(1e-9)
