"""Scheduled pull gossip and AD-PSGD: the resulting parameters, if ranks train one at a time and all at once."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import sordino.torch as hvd
from checks.registry import Seat, check
from sordino.algorithms import ADPSGD, Crossover, ScheduledPull
from sordino.algorithms.adpsgd.strategy import PairStrategy
from sordino.algorithms.scheduled_pull.schedule import Pull
from sordino.algorithms.scheduled_pull.strategy import PullStrategy
from sordino.errors import UsageError

PULLS = {
    "none": ScheduledPull(2, overlap="none"),
    "naive": ScheduledPull(2, overlap="naive"),
    "manager": ScheduledPull(2, schedule="manager", manager=1),
    "autonomous": ScheduledPull(2),
}
ROUNDS, PULLS_A_ROUND = 4, 4
ALL: dict[str, ScheduledPull | ADPSGD] = {**PULLS, "adpsgd": ADPSGD(2), "adpsgd-at-once": ADPSGD(2, overlap=0)}


class Odd(torch.nn.Module):
    """Model with parameters of several dtypes and sizes, one of which is large."""

    def __init__(self, value: float) -> None:
        super().__init__()
        for name, (count, dtype) in {
            "none": (0, torch.float32),
            "big": (70001, torch.float32),
            "wide": (11, torch.float64),
            "short": (5, torch.bfloat16),
        }.items():
            self.register_parameter(name, torch.nn.Parameter(torch.full((count,), value, dtype=dtype)))
        self.register_buffer("mean", torch.full((3,), value))

    def value(self) -> float:
        """Return the value of all elements; fail if they differ."""
        values = torch.cat([getattr(self, name).detach().double() for name in ("none", "big", "wide")])
        assert bool((values == values[0]).all()), f"torn: {values.unique().tolist()[:5]}"
        return values[0].item()


def wrap(model: torch.nn.Module, algorithm: ScheduledPull | ADPSGD, lr: float = 0.0, **options: object):
    return hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=lr), model.named_parameters(), algorithm=algorithm, **options
    )


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < limit, "it does not come true"
        time.sleep(0.0005)


def pull_of(optimizer: hvd.DistributedOptimizer) -> str | None:
    """Return the state of this window's pull, or None without a pull."""
    reducer = optimizer._strategy
    assert isinstance(reducer, PullStrategy)
    return None if reducer._puller._pull is None else reducer._puller._pull.state


def rounded(value: float) -> float:
    return torch.tensor(value).bfloat16().item()


@check(least=2, overlap=("none", "naive"))
def pulls_one_rank_at_a_time(seat: Seat, overlap: str) -> None:
    """Compare with a model of all ranks' values, which fall by 1/2 in each step: the peers of pulls, and the age of the
    values."""
    algorithm = PULLS[overlap]
    model = Odd(float(seat.rank * 8))
    optimizer = wrap(model, algorithm, lr=0.5)
    optimizer._strategy.begin(optimizer._inner)  # the first step waits for all ranks
    if overlap == "naive":
        until(lambda: pull_of(optimizer) == "done")
    seat.meet("begun")
    values = [(float(rank * 8), float(rank * 8)) for rank in range(seat.size)]  # exact, and rounded to bfloat16
    schedules = [algorithm.schedule_of(rank, seat.size) for rank in range(seat.size)]
    pulled = list(values)

    def take(rank: int, actions: list[object]) -> None:
        for action in actions:
            assert isinstance(action, Pull)
            pulled[rank] = values[action.peer]

    for rank in range(seat.size):
        take(rank, schedules[rank].window(0, 0))
    for turn in range(8):
        for rank in range(seat.size):
            values[rank] = values[rank][0] - 0.5, rounded(values[rank][1] - 0.5)
            if turn % 2 == 1:
                take(rank, schedules[rank].ended(0))
                exact, short = ((mine + other) / 2 for mine, other in zip(values[rank], pulled[rank]))
                values[rank] = exact, rounded(short)
                take(rank, schedules[rank].window(0, 0))
            if rank == seat.rank:
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()
                if overlap == "naive":
                    until(lambda: pull_of(optimizer) == "done")
                assert (model.value(), model.short[0].item()) == values[rank], (turn, values)
            seat.meet(f"{turn}.{rank}")
    assert optimizer.statistics.pulls == optimizer.statistics.windows == 4


@check(least=2, kind=tuple(PULLS))
def models_stay_whole_and_come_together(seat: Seat, kind: str) -> None:
    """All ranks run at once at full speed. A torn snapshot would leave elements that differ."""
    model = Odd(float(seat.rank))
    for name in ("short",):  # its mean with another is rounded
        getattr(model, name).requires_grad_(False)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.0), algorithm=PULLS[kind])
    optimizer.step()
    schedule = optimizer._strategy._puller._schedule
    pulled, told = schedule.pulled, 0

    def count(*arguments: Any) -> Any:
        nonlocal told
        told += 1
        return pulled(*arguments)

    schedule.pulled = count
    steps, statistics = 1, optimizer.statistics
    # In rounds: a rank that finished all its pulls before the others begin would not have come closer to them.
    for turn in range(ROUNDS):
        while steps < 120 * (turn + 1) // ROUNDS or statistics.pulls < PULLS_A_ROUND * (turn + 1):
            optimizer.step()
            steps += 1
            big, wide = model.big.detach(), model.wide.detach()
            assert big.min() == big.max() and wide.min() == wide.max(), steps
            assert 0 <= big[0] <= seat.size - 1
        seat.meet(f"round {turn}")  # a rank that ended could not be pulled from
    assert statistics.windows == steps // 2
    # The first pull may have ended before the counting, and the pull of the next window may have ended already.
    assert statistics.pulls - 1 <= told <= statistics.pulls + 1, "pulls that ended are not told to the schedule"
    assert statistics.failed == 0
    spread = hvd.allgather(model.wide.detach()[:1])
    assert float(spread.max() - spread.min()) < 0.5 * (seat.size - 1)
    numbers = optimizer.statistics.as_dict()
    assert len(numbers["ages"]) == statistics.pulls and min(numbers["seconds"]) >= 0


def settle(seat: Seat, optimizer: hvd.DistributedOptimizer) -> None:
    """Wait until all averagings of all ranks are done and are in the parameters."""
    optimizer.flush()
    seat.meet("flushed")
    reducer = optimizer._strategy
    assert isinstance(reducer, PairStrategy)
    until(lambda: reducer._averager._number is None)
    seat.meet("idle")
    optimizer.flush()


@check(least=2, overlap=(0, 1, 3))
def averaging_in_pairs_conserves_the_mean(seat: Seat, overlap: int) -> None:
    """With steps and averagings at once, the mean of all models is the mean that the steps alone would give."""
    generator = torch.Generator().manual_seed(seat.rank)
    model = torch.nn.ParameterDict({"a": torch.randn(50001, generator=generator).double(), "b": torch.zeros(3)})
    start = model["a"].detach().clone()
    first, before = hvd.allreduce(start), float(hvd.allreduce((start - hvd.allreduce(start)).square().mean()))
    optimizer = wrap(model, ADPSGD(overlap=overlap), lr=0.5)
    for _ in range(25):
        model["a"].grad = torch.full_like(model["a"], float(seat.rank))
        optimizer.step()
    settle(seat, optimizer)
    mean = hvd.allreduce(model["a"].detach())
    torch.testing.assert_close(mean, first - 0.5 * 25 * (seat.size - 1) / 2, atol=1e-9, rtol=0)
    apart = float(hvd.allreduce((model["a"].detach() - mean).var()))  # steps add the same to all elements
    assert apart < 0.2 * before, (before, apart)
    assert 25 // max(overlap, 1) <= optimizer.statistics.begun <= 25
    assert optimizer.statistics.failed == 0


@check(least=2)
def what_others_change_between_steps_stays(seat: Seat) -> None:
    model = torch.nn.ParameterDict({"a": torch.full((1000,), float(seat.rank)).double()})
    optimizer = wrap(model, ADPSGD())
    for turn in range(20):
        optimizer.step()
        if turn == 5:
            with torch.no_grad():
                model["a"] += 100
    settle(seat, optimizer)
    mean = hvd.allreduce(model["a"].detach())
    torch.testing.assert_close(mean, torch.full_like(mean, (seat.size - 1) / 2 + 100), atol=1e-9, rtol=0)


@check(least=2, kind=tuple(ALL))
def nobody_sees_parameters_before_training(seat: Seat, kind: str) -> None:
    """Scripts broadcast after they wrap the optimizer. Parameters from before must not come back from other ranks."""
    model = Odd(1000.0 * (seat.rank + 1))
    optimizer = wrap(model, ALL[kind])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    time.sleep(0.02 * seat.rank)
    for _ in range(8):
        optimizer.step()
        assert model.wide.unique().tolist() == [1000.0]


@check(least=2, kind=tuple(ALL), whole=(True, False))
def a_loaded_model_is_not_mixed_with_the_one_before(seat: Seat, kind: str, whole: bool) -> None:
    """All ranks return to a checkpoint in the middle of an interval, then the ranks train one after the other."""
    model = Odd(0.0)
    optimizer = wrap(model, ALL[kind], lr=1.0)
    saved = optimizer.state_dict()
    if not whole:
        del saved["sordino"]  # the state of an optimizer that was not wrapped
    for _ in range(5):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1000.0)
        optimizer.step()
    if kind == "naive":
        until(lambda: pull_of(optimizer) == "done")
    seat.meet("trained")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer.load_state_dict(saved)
    optimizer.zero_grad()
    seat.meet("loaded")
    for turn in range(seat.size):
        for _ in range(4 if turn == seat.rank else 0):
            optimizer.step()
        seat.meet(f"turn {turn}")
    optimizer.flush()
    assert model.value() == 0
    assert not bool(model.short.any())


@check(least=2, kind=("none", "adpsgd-at-once"))
def buffers_take_part_if_asked(seat: Seat, kind: str) -> None:
    for buffers in ("local", "average"):
        algorithm = dataclasses.replace(ALL[kind], buffers=buffers)
        model = Odd(float(seat.rank))
        named = model.named_buffers() if buffers == "average" else None
        optimizer = wrap(model, algorithm, named_buffers=named)
        for _ in range(12):
            optimizer.step()
        seat.meet(buffers)
        spread = hvd.allgather(model.mean[:1])
        whole = float(spread.max() - spread.min()) == seat.size - 1
        assert whole == (buffers == "local"), spread


@check(least=2, kind=tuple(ALL))
def states_optimizers_and_groups(seat: Seat, kind: str) -> None:
    """Two optimizers at once, a copy, a loaded state, and parameters that are added."""
    first, second = Odd(float(seat.rank)), Odd(float(seat.rank))
    one, two = wrap(first, ALL[kind]), wrap(second, ALL[kind])
    for _ in range(6):
        one.step()
        two.step()
    assert one.state_dict()["sordino"] == {"algorithm": one._options.algorithm.label, "steps": 6}
    one.load_state_dict({**one.state_dict(), "sordino": {"steps": 11}})
    one.step()
    assert one.state_dict()["sordino"]["steps"] == 12
    with pytest.raises(UsageError, match="steps"):
        one.load_state_dict({**two.state_dict(), "sordino": {}})
    three = copy.deepcopy(two)
    for _ in range(4):
        three.step()
    added = torch.nn.Parameter(torch.full((9,), float(seat.rank)))
    two.add_param_group({"params": [added]})
    for _ in range(12):
        two.step()
    seat.meet("stepped")
    spread = hvd.allgather(added.detach()[:1])
    assert float(spread.max() - spread.min()) < seat.size - 1
    assert two.statistics.as_dict()["messages"] >= 0


@check(least=2, kind=tuple(ALL))
def ranks_may_take_different_numbers_of_steps(seat: Seat, kind: str) -> None:
    model = Odd(float(seat.rank))
    optimizer = wrap(model, ALL[kind])
    for _ in range(4 + 4 * seat.rank):
        optimizer.step()
    assert hvd.join() in range(seat.size)
    optimizer.step()


@check(least=2, kind=tuple(ALL))
def who_has_left_is_not_missed(seat: Seat, kind: str) -> None:
    model = Odd(float(seat.rank))
    optimizer = wrap(model, ALL[kind])
    for _ in range(6 if seat.rank == 0 else 60):
        optimizer.step()


@check(least=3, kind=tuple(ALL))
def process_sets_pull_among_themselves(seat: Seat, kind: str) -> None:
    some = hvd.add_process_set(range(1, seat.size))
    model = Odd(float(seat.rank))
    algorithm = ALL[kind]
    if kind == "manager":
        algorithm = ScheduledPull(2, schedule="manager", manager=seat.size - 2)
    optimizer = wrap(model, algorithm, process_set=some)
    for _ in range(20):
        optimizer.step()
    seat.meet("stepped")
    values = hvd.allgather(model.wide.detach()[:1])
    assert float(values[0]) == 0
    assert float(values[1:].min()) >= 1


@check()
def wide_area_misuse(seat: Seat) -> None:
    model = Odd(0.0)
    for fields in (
        {"overlap": "late"},
        {"schedule": "nobody"},
        {"threshold": 1.0},
        {"patience": 0.0},
        {"manager": -1},
        {"interval": 0},
        {"seed": -1},
        {"buffers": "all"},
    ):
        with pytest.raises(UsageError, match=next(iter(fields))):
            ScheduledPull(**fields)
    for fields in ({"overlap": -1}, {"patience": -1.0}, {"interval": 0}):
        with pytest.raises(UsageError, match=next(iter(fields))):
            ADPSGD(**fields)
    with pytest.raises(UsageError, match="statistics"):
        _ = wrap(model, Crossover()).statistics
    with pytest.raises(UsageError, match="compression"):
        wrap(model, ScheduledPull(), compression=hvd.Compression.fp16)
    if seat.size == 1:
        optimizer = wrap(model, ScheduledPull())
        optimizer.step()
        assert optimizer.statistics.windows == 0
        return
    with pytest.raises(UsageError, match=f"the manager must be one of the {seat.size} ranks"):
        wrap(model, ScheduledPull(schedule="manager", manager=seat.size))
    with pytest.raises(UsageError, match="different settings"):
        wrap(model, ScheduledPull(2 if seat.rank == 0 else 3))
    hvd.barrier()  # the world stays usable
