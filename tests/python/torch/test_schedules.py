"""Learning-rate rules and the warm-up against their closed forms, with every kind of scheduler after it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import sordino.torch as hvd
from sordino import checkpoint, sim
from sordino.errors import UsageError
from sordino.torch.schedules import GradualWarmup, scale_learning_rate

Make = Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]

AFTER: dict[str, Make] = {
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 6, eta_min=0.001),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.1),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.5 / (1 + epoch)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 6, power=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=12),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "GradualWarmup": lambda o: GradualWarmup(o, 3, 0.5, lr_scheduler.ExponentialLR(o, 0.9)),
}


def make_optimizer(rates: tuple[float, ...] = (0.8, 0.03)) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": lr} for lr in rates]
    return torch.optim.SGD(groups, lr=99.0, momentum=0.9)


def rates_of(optimizer: torch.optim.Optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


def run(scheduler: lr_scheduler.LRScheduler, steps: int) -> list[list[float]]:
    """Return the rates before each of this many steps."""
    seen = []
    for _ in range(steps):
        seen.append(rates_of(scheduler.optimizer))
        assert scheduler.get_last_lr() == seen[-1]
        scheduler.optimizer.step()
        scheduler.step()
    return seen


@pytest.mark.parametrize(
    ("lr", "workers", "rule", "expected"),
    [
        (0.1, 1, "linear", 0.1),
        (0.125, 32, "linear", 4.0),
        (0.0, 8, "linear", 0.0),
        (0.1, 1, "sqrt", 0.1),
        (0.125, 16, "sqrt", 0.5),
        (0.5, 2, "sqrt", 0.5 * 2**0.5),
        (0.1, 64, "none", 0.1),
        (1, 4, "linear", 4.0),
        (1, 4, "none", 1.0),
    ],
)
def test_the_scaling_rules(lr: float, workers: int, rule: str, expected: float) -> None:
    scaled = scale_learning_rate(lr, workers, rule)
    assert scaled == expected and isinstance(scaled, float)


def test_linear_is_the_default_rule() -> None:
    assert scale_learning_rate(0.25, 6) == 1.5


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("lr", (-0.1, 2)),
        ("lr", (float("nan"), 2)),
        ("lr", ("0.1", 2)),
        ("workers", (0.1, 0)),
        ("workers", (0.1, -3)),
        ("workers", (0.1, 2.0)),
        ("workers", (0.1, True)),
        ("rule", (0.1, 2, "Linear")),
        ("rule", (0.1, 2, None)),
    ],
)
def test_wrong_input_of_the_rules_is_named(field: str, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(UsageError, match=rf"\({field}="):
        scale_learning_rate(*arguments)


@pytest.mark.filterwarnings("error")  # torch warns of schedulers that step before their optimizer
@pytest.mark.parametrize("start", [0.0, 1 / 64, 1 / 3, 0.7, 1.0])
@pytest.mark.parametrize("steps", [1, 2, 7, 1000])
def test_the_ramp_is_linear_and_ends_at_the_base(steps: int, start: float) -> None:
    bases = (0.8, 0.03)
    seen = run(GradualWarmup(make_optimizer(bases), steps, start), steps + 4)
    for t, rates in enumerate(seen[:steps]):
        assert rates == pytest.approx(
            [base * (start + (1 - start) * t / steps) for base in bases], rel=1e-12, abs=1e-16
        )
    assert seen[0] == [base * start for base in bases]
    assert seen[steps:] == [[*bases]] * 4


def test_no_warm_up_at_all() -> None:
    assert run(GradualWarmup(make_optimizer(), 0, 0.1), 3) == [[0.8, 0.03]] * 3


def test_from_the_rate_of_one_worker_to_that_of_all() -> None:
    """Goyal et al. 2017: from 0.1 to 0.1 * kn, by the same amount in each step."""
    scaled = scale_learning_rate(0.1, 32)
    scheduler = GradualWarmup(make_optimizer((scaled,)), 5, start_factor=0.1 / scaled)
    expected = [[0.1 + (3.2 - 0.1) * t / 5] for t in range(6)]
    assert [pytest.approx(rates, rel=1e-12) for rates in expected] == run(scheduler, 6)


@pytest.mark.parametrize("steps", [0, 1, 5])
@pytest.mark.parametrize("name", AFTER)
def test_what_follows_sees_its_own_steps(name: str, steps: int) -> None:
    alone = run(AFTER[name](make_optimizer()), 10)
    optimizer = make_optimizer()
    scheduler = GradualWarmup(optimizer, steps, 0.25, after=AFTER[name](optimizer))
    seen = run(scheduler, steps + 10)
    assert seen[steps:] == alone
    assert scheduler.last_epoch == steps + 10
    for t, rates in enumerate(seen[:steps]):
        assert rates == pytest.approx([first * (0.25 + 0.75 * t / steps) for first in alone[0]], rel=1e-12)


@pytest.mark.filterwarnings("error")
def test_no_warnings_at_the_hand_over() -> None:
    optimizer = make_optimizer()
    run(GradualWarmup(optimizer, 2, 0.1, AFTER["CosineAnnealingLR"](optimizer)), 6)


@pytest.mark.parametrize("order", ["optimizer first", "optimizer last", "schedule only"])
@pytest.mark.parametrize("stop", [0, 1, 3, 4, 5, 9])
@pytest.mark.parametrize("name", ["nothing", "CosineAnnealingLR", "MultiplicativeLR", "SequentialLR", "GradualWarmup"])
def test_a_saved_state_goes_on_exactly(name: str, stop: int, order: str, tmp_path: Path) -> None:
    def make(optimizer: torch.optim.Optimizer, steps: int, start: float) -> GradualWarmup:
        return GradualWarmup(optimizer, steps, start, AFTER[name](optimizer) if name in AFTER else None)

    straight = make(make_optimizer(), 4, 0.1)
    run(straight, stop)
    state = {"schedule": straight.state_dict(), "optimizer": straight.optimizer.state_dict()}
    checkpoint.save(tmp_path / "state", state)
    kept = copy.deepcopy(state["schedule"])
    expected = run(straight, 8)
    if name != "SequentialLR":  # the state of torch's own refers to the live states of its sub-schedulers
        assert state["schedule"] == kept, "a state changed after it was taken"

    loaded = checkpoint.load(tmp_path / "state")
    optimizer = make_optimizer()
    if order == "optimizer first":
        optimizer.load_state_dict(loaded["optimizer"])
    resumed = make(optimizer, 7, 0.9)  # the numbers in the state have priority
    resumed.load_state_dict(loaded["schedule"])
    if order == "optimizer last":
        optimizer.load_state_dict(loaded["optimizer"])
    assert run(resumed, 8) == expected


def test_a_state_of_another_shape_is_refused() -> None:
    def make(follow: bool, rates: tuple[float, ...] = (0.8, 0.03)) -> GradualWarmup:
        optimizer = make_optimizer(rates)
        return GradualWarmup(optimizer, 3, 0.1, AFTER["StepLR"](optimizer) if follow else None)

    for has, lacks in ((True, False), (False, True)):
        scheduler = make(lacks)
        before = copy.deepcopy(scheduler.state_dict())
        with pytest.raises(UsageError, match="after the warm-up"):
            scheduler.load_state_dict(make(has).state_dict())
        assert scheduler.state_dict() == before
    with pytest.raises(UsageError, match="has 1 parameter groups, but the optimizer has 2"):
        make(True).load_state_dict(make(True, (0.5,)).state_dict())


def test_rates_that_are_tensors_stay_tensors() -> None:
    def make() -> tuple[torch.Tensor, GradualWarmup]:
        rate = torch.tensor(0.5, dtype=torch.float64)
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=rate)
        return optimizer.param_groups[0]["lr"], GradualWarmup(optimizer, 4, 0.2)

    rate, scheduler = make()
    for t in range(7):
        assert rate.item() == pytest.approx(0.5 * (0.2 + 0.8 * min(t, 4) / 4), rel=1e-12)
        if t == 2:
            state = copy.deepcopy(scheduler.state_dict())
        scheduler.optimizer.step()
        scheduler.step()
    restored_rate, restored = make()
    restored.load_state_dict(state)
    assert restored_rate.item() == pytest.approx(0.5 * 0.6, rel=1e-12)
    assert restored.optimizer.param_groups[0]["lr"] is restored_rate


def test_it_drives_a_distributed_optimizer() -> None:
    expected_optimizer = make_optimizer((0.8,))
    expected = run(GradualWarmup(expected_optimizer, 3, 0.5, AFTER["CosineAnnealingLR"](expected_optimizer)), 8)

    def body() -> tuple[list[list[float]], list[float]]:
        inner = make_optimizer((0.8,))
        optimizer = hvd.DistributedOptimizer(inner)
        scheduler = GradualWarmup(optimizer, 3, 0.5, AFTER["CosineAnnealingLR"](optimizer))
        (p,) = inner.param_groups[0]["params"]
        seen, moves = [], []
        for _ in range(8):
            seen.append(rates_of(inner))
            optimizer.zero_grad()
            inner.state.clear()  # without momentum a step moves by the rate
            (p.sum() * (2 * hvd.rank())).backward()
            before = p[0].item()
            optimizer.step()
            scheduler.step()
            moves.append(before - p[0].item())
        return seen, moves

    for seen, moves in sim.run(2, body):
        assert seen == expected
        assert moves == pytest.approx([rates[0] for rates in expected], abs=1e-5)  # the average gradient is 1


def test_both_must_be_of_the_distributed_optimizer() -> None:
    def body() -> None:
        inner = make_optimizer()
        optimizer = hvd.DistributedOptimizer(inner)
        with pytest.raises(UsageError, match="another optimizer"):
            GradualWarmup(optimizer, 3, 0.5, AFTER["StepLR"](inner))

    sim.run(1, body)


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("warmup_steps", (-1, 0.5)),
        ("warmup_steps", (2.0, 0.5)),
        ("warmup_steps", (True, 0.5)),
        ("start_factor", (2, -0.1)),
        ("start_factor", (2, 1.1)),
        ("start_factor", (2, float("nan"))),
        ("start_factor", (2, None)),
        ("after", (2, 0.5, "cosine")),
    ],
)
def test_wrong_input_of_the_warm_up_is_named(field: str, arguments: tuple[Any, ...]) -> None:
    optimizer = make_optimizer()
    with pytest.raises(UsageError, match=rf"\({field}="):
        GradualWarmup(optimizer, *arguments)
    assert rates_of(optimizer) == [0.8, 0.03]


def test_it_wants_an_optimizer() -> None:
    with pytest.raises(UsageError, match="must be an optimizer, not a Linear"):
        GradualWarmup(torch.nn.Linear(2, 2), 3, 0.5)  # type: ignore[arg-type]


def test_what_cannot_follow_is_refused() -> None:
    optimizer = make_optimizer()
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(UsageError, match="without a metric, not a ReduceLROnPlateau"):
        GradualWarmup(optimizer, 3, 0.5, plateau)
    worn = AFTER["StepLR"](optimizer)
    run(worn, 2)
    with pytest.raises(UsageError, match="has made 2 steps"):
        GradualWarmup(optimizer, 3, 0.5, worn)
