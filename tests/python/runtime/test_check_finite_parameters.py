"""check_finite: parameters that the optimizer itself breaks, and settings that the argument excludes."""

from __future__ import annotations

import math

import pytest
import torch
from finite_cases import leaf, refused, wrap

import sordino.torch as hvd
from sordino import sim
from sordino.algorithms import (
    ADPSGD,
    Algorithm,
    AllReduce,
    CaPS,
    Crossover,
    ElasticAveraging,
    LocalSGD,
    PushSum,
    ScheduledPull,
)
from sordino.errors import ConfigurationMismatch, UsageError


def broken_by_the_optimizer(algorithm: Algorithm) -> None:
    weight = leaf()
    optimizer = wrap({"w": weight}, algorithm, lr=1e30 if hvd.rank() == 1 else 0.5)
    (weight.sum() * (1e10 if hvd.rank() == 1 else 1.0)).backward()  # float32 ends at 3.4e38
    error = refused(optimizer.step)
    assert error.tensors == {1: {"w": "Inf"}} and str(error).startswith("parameters are not finite")
    if hvd.rank() != 1:
        assert weight.tolist() == [0.5] * 5, "of its own step, and of nobody else's"


EXCHANGING = (
    Crossover(), ElasticAveraging(), LocalSGD(1), LocalSGD(1, exchange="allreduce"), CaPS(), PushSum(),
    PushSum(overlap=1),
)  # fmt: skip


@pytest.mark.parametrize("algorithm", EXCHANGING, ids=str)
def test_parameters_that_a_step_has_broken_are_not_exchanged(algorithm: Algorithm) -> None:
    sim.run(3, broken_by_the_optimizer, algorithm)


def broken_alone(algorithm: Algorithm) -> None:
    weight = leaf()
    optimizer = wrap({"w": weight}, algorithm, lr=0.01)
    for turn in range(8):
        optimizer.zero_grad()
        breaks = turn == 3 and hvd.rank() == 1
        (weight.sum() * (1e10 if breaks else 1.0)).backward()
        if breaks:
            optimizer.param_groups[0]["lr"] = 1e30
            assert refused(optimizer.step).tensors == {1: {"w": "Inf"}}
            if isinstance(algorithm, ADPSGD):
                assert weight.isfinite().all(), "they are those before the step"
            with torch.no_grad():
                weight.fill_(0.5)  # as from a checkpoint
            optimizer.param_groups[0]["lr"] = 0.01
        else:
            optimizer.step()
    optimizer.flush()
    assert weight.isfinite().all()


@pytest.mark.parametrize("algorithm", (ADPSGD(), ScheduledPull(2), ScheduledPull(1)), ids=str)
def test_nobody_sees_what_a_rank_does_not_publish(algorithm: Algorithm) -> None:
    sim.run(3, broken_alone, algorithm)


def broken_from_the_start(algorithm: Algorithm) -> None:
    weight = leaf()
    optimizer = wrap({"w": weight}, algorithm)
    with torch.no_grad():
        weight[-1] = math.nan if hvd.rank() == 2 else 1.0
    weight.sum().backward()
    assert refused(optimizer.step).tensors == {2: {"w": "NaN"}}


@pytest.mark.parametrize("algorithm", (ADPSGD(), ScheduledPull(2), ElasticAveraging()), ids=str)
def test_parameters_that_all_would_begin_with(algorithm: Algorithm) -> None:
    sim.run(3, broken_from_the_start, algorithm)


def narrowed_changes() -> None:
    weight = leaf()
    optimizer = wrap({"w": weight}, op=hvd.Adasum, compression=hvd.Compression.fp16, lr=1.0)
    (weight.sum() * (1e6 if hvd.rank() == 1 else 1.0)).backward()
    error = refused(optimizer.step)
    assert error.tensors == {1: {"w": "Inf"}} and "changes of parameters" in str(error)
    assert weight.tolist() == [1.0] * 5
    optimizer.zero_grad()
    weight.sum().backward()
    optimizer.step()
    assert weight.tolist() == [0.0] * 5


def test_changes_that_adasum_would_combine() -> None:
    sim.run(2, narrowed_changes)


def with_scaler(algorithm: Algorithm) -> None:
    weight = leaf()
    optimizer = wrap({"w": weight}, algorithm)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(weight.sum()).backward()
    with pytest.raises(UsageError, match="check_finite=True cannot be combined with GradScaler"):
        scaler.step(optimizer)
    assert weight.tolist() == [1.0] * 5


@pytest.mark.parametrize("algorithm", (AllReduce(), Crossover(), ADPSGD()), ids=str)
def test_a_scaler_is_refused(algorithm: Algorithm) -> None:
    sim.run(2, with_scaler, algorithm)


def with_closure(algorithm: Algorithm) -> None:
    weight = leaf()
    optimizer = wrap({"w": weight}, algorithm)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = weight.sum() * (math.nan if hvd.rank() == 1 else 1.0)
        loss.backward()
        return loss

    if isinstance(algorithm, AllReduce):
        assert refused(lambda: optimizer.step(closure)).ranks == (1,)
    else:
        with pytest.raises(UsageError, match="ranks may evaluate a closure different numbers of times"):
            optimizer.step(closure)
    assert weight.tolist() == [1.0] * 5


@pytest.mark.parametrize("algorithm", (AllReduce(), Crossover()), ids=str)
def test_closures(algorithm: Algorithm) -> None:
    sim.run(2, with_closure, algorithm)


def on_some() -> None:
    with pytest.raises(ConfigurationMismatch, match="rank 0 has check_finite=True, ranks 1-2 have check_finite=False"):
        wrap({"w": leaf()}, check_finite=hvd.rank() == 0)


def test_all_or_none() -> None:
    sim.run(3, on_some)


def test_it_is_a_bool() -> None:
    with pytest.raises(UsageError, match="check_finite='yes'"):
        sim.run(1, lambda: wrap({"w": leaf()}, check_finite="yes"))


def without() -> None:
    weight = leaf()
    optimizer = wrap({"w": weight}, check_finite=False)
    (weight.sum() * math.nan).backward()
    optimizer.step()
    assert weight.isnan().all()


def test_it_is_off_by_default() -> None:
    sim.run(2, without)
