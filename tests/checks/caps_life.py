"""Parameter skipping over the life of a training: the threshold, checkpoints, parameters that are added later, and
misuse."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import sordino.torch as hvd
from checks.caps import DETECTORS, NEVER, Planted, first, skipping, states
from checks.odd import Odd, step, wrap
from checks.registry import Seat, check, skipping_on_servers
from sordino.algorithms import CaPS, LocalSGD, ThresholdScheduler
from sordino.errors import UsageError
from sordino.runtime.context import current

# ---- threshold and checkpoints ---------------------------------------------------------------------------------------


@check(least=1, helpers=("", "servers"))
def the_threshold_follows_the_mean_metric(seat: Seat) -> None:
    scheduler = ThresholdScheduler(history_length=2, frequency=2, step=3.0)
    planted = Planted(skipping(threshold=50, scheduler=scheduler), 40)
    found = []
    for metric in (5.0, 4.0, 3.0, 4.0, 9.0, 8.0):
        planted.step(1.0)
        planted.optimizer.report_metric(metric + (seat.rank - (seat.size - 1) / 2) * 100)
        found.append(planted.optimizer.state_dict()["sordino"]["threshold"])
    assert found == [50, 47, 47, 50, 50, 47]
    metrics = [point.metric for point in planted.optimizer.statistics.points]
    assert metrics == pytest.approx([5, 4, 3, 4, 9, 8])


@check(least=2)
def schedulers_that_are_told_nothing_say_so(seat: Seat) -> None:
    planted = Planted(skipping(scheduler=ThresholdScheduler()), 40)
    planted.step(1.0)
    with seat.warned(r"report_metric\(loss\) has not been called", UserWarning):
        planted.optimizer.state_dict()
    planted.optimizer.report_metric(1.0)
    with seat.no_warnings():
        planted.optimizer.state_dict()


def same_from_here(seat: Seat, pairs: Sequence[tuple[torch.nn.Module, Any]], turns: range) -> None:
    for turn in turns:
        for model, optimizer in pairs:
            step(seat, model, optimizer, turn)
        (one, mine), (other, theirs) = pairs
        for left, right in zip(one.parameters(), other.parameters()):
            assert torch.equal(left, right)
        assert states(mine) == states(theirs)


@check(least=2, helpers=("", "servers"), detector=DETECTORS)
def a_checkpoint_goes_on_bit_for_bit(seat: Seat, detector: str) -> None:
    scheduler = ThresholdScheduler(history_length=2, frequency=1, step=2.0)
    digits = None if detector == "movement" else 3
    algorithm = skipping(
        detector=detector, threshold=20, digits=digits, sample_ratio=0.3, survey_interval=3, scheduler=scheduler
    )
    model = Odd()
    optimizer = wrap(model, algorithm)
    for turn in range(7):
        step(seat, model, optimizer, turn)
    for metric in (3.0, 2.0):
        optimizer.report_metric(metric)
    state = copy.deepcopy(optimizer.state_dict())  # load_state_dict() does not copy tensors
    assert state["sordino"]["threshold"] == 18 and state["sordino"]["metrics"] == [3.0, 2.0]
    twin = Odd()
    twin.load_state_dict(model.state_dict())
    resumed = wrap(twin, algorithm)
    resumed.load_state_dict(state)
    assert states(resumed) == states(optimizer)
    same_from_here(seat, [(model, optimizer), (twin, resumed)], range(7, 20))
    for one in (optimizer, resumed):
        one.report_metric(5.0)
        assert one.state_dict()["sordino"]["threshold"] == 20


@check(least=2)
def another_threshold_counts_after_a_restart(seat: Seat) -> None:
    """A threshold in a state replaces the threshold of the optimizer only if a scheduler has set it."""
    model = Odd()
    optimizer = wrap(model, CaPS(threshold=30))
    step(seat, model, optimizer, 0)
    other = wrap(Odd(), CaPS(threshold=20))
    other.load_state_dict(optimizer.state_dict())
    assert other.state_dict()["sordino"]["threshold"] == 20


@check(least=2)
def states_of_something_else_are_refused(seat: Seat) -> None:
    """A state that does not fit is refused as a whole: the optimizer stays as it was."""
    model = Odd()
    optimizer = wrap(model, CaPS("history"))
    step(seat, model, optimizer, 0)
    state = optimizer.state_dict()
    state["sordino"].update(threshold=77.0, epochs=1)
    other = Planted(CaPS("history", scheduler=ThresholdScheduler()), 7, 7, 7, 7, 7, 7, momentum=0.9)
    with pytest.raises(UsageError, match="counters of"):
        other.optimizer.load_state_dict({**other.optimizer.state_dict(), "sordino": state["sordino"]})
    assert other.optimizer.state_dict()["sordino"]["threshold"] == 10
    with pytest.raises(UsageError, match="no counters of changes"):
        optimizer.load_state_dict(wrap(Odd(), CaPS()).state_dict())
    with pytest.raises(UsageError, match="6 tensors or blocks, but there are"):
        wrap(Odd(), CaPS("history", granularity="block", block_bytes=64)).load_state_dict(state)
    with pytest.raises(UsageError, match="with detector='history'"):
        wrap(Odd(), CaPS()).load_state_dict(state)
    with pytest.raises(UsageError, match="no averages of movement"):
        wrap(Odd(), CaPS("movement")).load_state_dict(state)
    moving = wrap(Odd(), CaPS("movement")).state_dict()
    with pytest.raises(UsageError, match="no counters of changes"):
        optimizer.load_state_dict(moving)
    with pytest.raises(UsageError, match="with detector='movement'"):
        wrap(Odd(), CaPS()).load_state_dict(moving)
    with pytest.raises(UsageError, match="saved by CaPS"):
        wrap(Odd(), LocalSGD()).load_state_dict(state)


@check(least=2, helpers=("", "servers"))
def parameters_that_are_added_take_part(seat: Seat) -> None:
    """Parameters can be added: the threshold and the statistics stay, and no skipped movement is lost."""
    scheduler = ThresholdScheduler(history_length=2, frequency=1, step=5.0)
    planted = Planted(skipping(threshold=60, scheduler=scheduler), 20)
    planted.step(first(5, float(seat.rank)))
    for metric in (2.0, 1.0):
        planted.optimizer.report_metric(metric)
    added = torch.nn.Parameter(torch.ones(30))
    planted.tensors.append(added)
    planted.optimizer.add_param_group({"params": [added]})
    seat.same("settled", planted.tensors[0])
    assert planted.optimizer.state_dict()["sordino"]["threshold"] == 55
    planted.step(0.0, float(seat.rank))
    assert states(planted.optimizer) == [1, 0]
    torch.testing.assert_close(added, torch.ones(30) - 0.5 * (seat.size - 1) / 2)
    planted.optimizer.report_metric(3.0)
    statistics = planted.optimizer.statistics
    assert [point.metric for point in statistics.points] == [2.0, 1.0, 3.0]
    assert statistics.points[0].ratios == [1 if seat.rank == 0 else 0.75, None] and statistics.names[0] == "t0"
    # Bytes that add_param_group() averaged count for the next step.
    assert [point.bytes_sent for point in statistics.points] == [0, 0, 80 + 120]
    statistics.plot(f"{seat.folder}/{seat.rank}.png")
    with pytest.raises(ValueError, match="more than one parameter group"):
        planted.optimizer.add_param_group({"params": [added]})
    planted.step(0.0, float(seat.rank))


@check(least=2, quick=("sim-3x1",))
def statistics_stay_when_a_parameter_is_unfrozen(seat: Seat) -> None:
    planted = Planted(CaPS(threshold=60), 10, 20, frozen=[0])
    statistics = planted.optimizer.statistics
    planted.step(0.0, first(5, float(seat.rank)))
    planted.optimizer.report_metric(1.0)
    planted.optimizer.report_metric(2.0)  # without a step
    planted.step(0.0, 0.0)
    planted.optimizer.flush()
    assert statistics.bytes_sent == 80
    planted.tensors[0].requires_grad_(True)
    planted.step(1.0, 1.0)
    planted.optimizer.report_metric(3.0)
    assert planted.optimizer.statistics is statistics and statistics.names == ["t0", "t1"]
    assert [point.steps for point in statistics.points] == [1, 0, 1, 1]
    share = 1 if seat.rank == 0 else 0.75
    assert [point.ratios for point in statistics.points] == [[None, share], [], [None, 1], [0, 0]]
    assert [point.skipped for point in statistics.points] == [[None, 1], [], [None, 1], [0, 0]]
    assert [point.bytes_sent for point in statistics.points] == [0, 0, 80, 120]
    statistics.plot(f"{seat.folder}/{seat.rank}.png")


@check(least=2, helpers=("", "servers"))
def copies_go_on(seat: Seat) -> None:
    planted = Planted(skipping(threshold=60, scheduler=ThresholdScheduler(history_length=2, frequency=1)), 20)
    planted.step(first(5, float(seat.rank)))
    for metric in (2.0, 1.0):
        planted.optimizer.report_metric(metric)
    pair = copy.deepcopy((planted.tensors, planted.optimizer))
    assert states(pair[1]) == [1] and pair[1].state_dict()["sordino"]["threshold"] == 59


@check(least=2, helpers=("", "servers"))
def what_changes_between_steps_is_seen(seat: Seat) -> None:
    """Changes of parameters by user code are seen, after a step and after flush()."""
    planted = Planted(skipping(threshold=100, probe_interval=1000), 20)
    planted.step(0.0)
    for _ in range(2):
        planted.tensors[0].data.fill_(float(seat.rank))
        planted.step(0.0)
        torch.testing.assert_close(planted.tensors[0], torch.full((20,), (seat.size - 1) / 2))
        planted.optimizer.flush()


@check(least=2)
def ranks_that_are_set_up_differently_say_so(seat: Seat) -> None:
    for mine, others in (({"threshold": 101}, {}), ({"servers": 1, "exchange": "parameter-server"}, {})):
        with pytest.raises(UsageError, match="have different settings"):
            Planted(skipping(**(mine if seat.rank == seat.last else others)), 20)


@check(least=2)
def dropped_optimizers_are_gone(seat: Seat) -> None:
    """A dropped optimizer is freed without the garbage collector. Leftovers would make join() fail on some ranks."""
    for exchange in ("allreduce", "parameter-server"):
        planted = Planted(skipping(exchange=exchange), 20)
        planted.step(1.0)
        gone = weakref.ref(planted.optimizer._strategy)
        del planted
        assert gone() is None
    hvd.join()


@check(least=2)
def frozen_parameters_and_left_out_steps(seat: Seat) -> None:
    """A parameter without a gradient does not move, and a frozen one is ignored. If GradScaler skips a step on one
    worker, the others do not wait for it."""
    tensors = [torch.nn.Parameter(torch.ones(20)) for _ in range(3)]
    tensors[2].requires_grad_(False)
    inner = torch.optim.SGD(tensors, lr=1.0)
    optimizer = hvd.DistributedOptimizer(inner, list(zip("abc", tensors)), algorithm=skipping(threshold=50))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale((tensors[0] * (seat.rank + 1.0)).sum()).backward()
    if seat.rank == seat.last:
        tensors[0].grad.fill_(float("inf"))
    scaler.step(optimizer)
    scaler.update()
    assert states(optimizer) == [0, 1]
    moved = sum(range(seat.size)) / seat.size
    torch.testing.assert_close(tensors[0], torch.full((20,), 1 - moved))


def some(seed: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a gradient of ones in about half of the elements, so that a count depends on the compared elements."""

    def fill(gradient: torch.Tensor) -> torch.Tensor:
        drawn = torch.rand(gradient.numel(), generator=torch.Generator().manual_seed(seed))
        return gradient.masked_fill(drawn < 0.5, 1.0)

    return fill


@check(least=2, detector=DETECTORS)
def a_detector_goes_on_bit_for_bit(seat: Seat, detector: str) -> None:
    """A run that continues from a checkpoint compares and decides in every step like an uninterrupted run."""
    algorithm = skipping(detector=detector, threshold=50, seed=5, survey_interval=3, sample_ratio=0.3)
    whole, resumed = Planted(algorithm, 400, 90), Planted(algorithm, 400, 90)
    for turn in range(5):
        whole.step(some(turn), some(100 + turn))
    for mine, theirs in zip(whole.tensors, resumed.tensors):
        theirs.data.copy_(mine.data)
    resumed.optimizer.load_state_dict(copy.deepcopy(whole.optimizer.state_dict()))
    for turn in range(5, 9):
        for one in (whole, resumed):
            one.step(some(turn), some(100 + turn))
        here, there = whole.optimizer._strategy._detector, resumed.optimizer._strategy._detector
        assert torch.equal(here.counts, there.counts), turn
        assert states(whole.optimizer) == states(resumed.optimizer)
        if detector in ("random", "history"):
            assert torch.equal(here._indices, there._indices), turn
    for mine, theirs in zip(whole.tensors, resumed.tensors):
        assert torch.equal(mine, theirs)


# ---- misuse ----------------------------------------------------------------------------------------------------------


@check(least=2)
def misuse_is_told(seat: Seat) -> None:
    with pytest.raises(UsageError, match=r"needs hvd\.init\(algorithm="):
        Planted(skipping_on_servers(1), 10)
    with pytest.raises(UsageError, match=r"AllReduce.* keeps no statistics"):
        _ = hvd.DistributedOptimizer(torch.optim.SGD(Odd().parameters(), lr=1)).statistics
    planted = Planted(skipping(), 10)
    with pytest.raises(UsageError, match=r"join\(\) cannot replace a worker of CaPS"):
        hvd.join()
    planted.step(1.0)


@check(least=3, helpers=("servers",))
def servers_are_those_that_init_made(seat: Seat) -> None:
    helpers = current().helpers
    assert hvd.size() == helpers.context.size - len(helpers.roles.helpers)
    with pytest.raises(UsageError, match=r"needs hvd\.init\(algorithm="):
        Planted(skipping_on_servers(helpers.algorithm.servers + 1), 10)
    first_model, second_model = Planted(skipping(threshold=NEVER), 10), Planted(skipping(threshold=NEVER), 20)
    for _ in range(3):  # each has its own server threads
        first_model.step(float(seat.rank))
        second_model.step(float(seat.rank))
    near_mean = 0.5 * 3 * (seat.size - 1) / 2
    torch.testing.assert_close(second_model.tensors[0], torch.arange(20.0) + 1 - near_mean)


@check(least=2)
def buffers_are_averaged_if_asked(seat: Seat) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    model.load_state_dict({name: torch.ones_like(value) for name, value in model.state_dict().items()})
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        algorithm=CaPS(threshold=NEVER, buffers="average"),
        named_buffers=model.named_buffers(),
    )
    model(torch.full((2, 4), float(seat.rank))).sum().backward()
    optimizer.step()
    seat.same("running mean", model[1].running_mean)


@check(least=2)
def buffers_that_forward_has_changed_are_sent(seat: Seat) -> None:
    """This holds in the first step, and in the first one after a state was loaded: no copy is from before its
    forward."""

    def wrapped(model: torch.nn.Module) -> hvd.DistributedOptimizer:
        return hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model.named_parameters(),
            algorithm=CaPS(threshold=60, buffers="average"),
            named_buffers=model.named_buffers(),
        )

    model, other = torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3)
    optimizer = wrapped(model)
    for turn in range(3):
        inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * turn + seat.rank))
        if turn == 2:
            other.load_state_dict(model.state_dict())
            resumed = wrapped(other)
            resumed.load_state_dict(optimizer.state_dict())
            other(inputs).square().sum().backward()
            resumed.step()
            seat.same("resumed", other.running_mean, other.running_var)
        optimizer.zero_grad()
        model(inputs).square().sum().backward()
        optimizer.step()
        seat.same(f"step {turn}", model.running_mean, model.running_var)
    assert torch.equal(model.running_mean, other.running_mean)


@check(least=2)
def unchanged_buffers_are_skipped_from_the_second_step_on(seat: Seat) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        algorithm=CaPS(threshold=60, buffers="average"),
        named_buffers=[("fixed", torch.ones(5))],
    )
    skipped = []
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        skipped.append(int(optimizer.state_dict()["sordino"]["skipped"][-1]))
    assert skipped == [0, 1, 2]
