"""Ranks whose optimizers are set up differently: all raise ConfigurationMismatch with the settings of each rank, and
stay usable."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from algorithm_table import DEFAULTS
from torch import nn

import sordino.torch as hvd
from checks.optimizers import Twins
from checks.registry import Seat, check
from sordino.algorithms import (
    AllReduce,
    Crossover,
    Layered,
    LocalSGD,
)
from sordino.errors import ConfigurationMismatch, LayoutMismatch, UsageError
from sordino.fingerprint import rank_list

Options = dict[str, Any]
ALGORITHMS: dict[str, Any] = {
    **DEFAULTS,
    "buffered": AllReduce(double_buffering=True),
    "layered": Layered(1),
    "local whole": LocalSGD(exchange="allreduce"),
}
# By case: what most ranks give DistributedOptimizer, what the odd rank gives, and the error's words for both.
CASES: dict[str, tuple[Options, Options, str, str]] = {
    "seed": (
        {"algorithm": Crossover(seed=1)}, {"algorithm": Crossover(seed=2)}, "Crossover(seed=1)", "Crossover(seed=2)"
    ),
    "interval": (
        {"algorithm": LocalSGD(4)}, {"algorithm": LocalSGD(3)}, "LocalSGD(interval=4)", "LocalSGD(interval=3)"
    ),
    "segments": ({}, {"algorithm": AllReduce(7)}, "AllReduce(bucket_bytes=16777216)", "AllReduce(bucket_bytes=7)"),
    "op": ({}, {"op": hvd.Sum}, "op=Average", "op=Sum"),
    "adasum": ({}, {"op": hvd.Adasum}, "op=Average", "op=Adasum"),
    "compression": (
        {"compression": hvd.Compression.bf16}, {}, "compression=BF16Compressor", "compression=NoneCompressor"
    ),
    "passes": ({}, {"backward_passes_per_step": 2}, "backward_passes_per_step=1", "backward_passes_per_step=2"),
    "predivide": (
        {}, {"gradient_predivide_factor": 2.0}, "gradient_predivide_factor=1.0", "gradient_predivide_factor=2.0"
    ),
    "sparse": ({}, {"sparse_as_dense": True}, "sparse_as_dense=False", "sparse_as_dense=True"),
    "groups": ({"groups": 1}, {"groups": 2}, "groups=((0, 1, 2, 3),)", "groups=((0, 1), (2, 3))"),
}  # fmt: skip


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def wrap(kind: Callable[..., torch.optim.Optimizer] = torch.optim.SGD, **options: Any) -> hvd.DistributedOptimizer:
    model = network()
    return hvd.DistributedOptimizer(kind(model.parameters(), lr=0.1), model.named_parameters(), **options)


def expect(seat: Seat, odd: int, usual: str, unusual: str, make: Callable[[], object]) -> ConfigurationMismatch:
    """Check that `make` raises on every rank, and that the error names the setting of rank `odd`."""
    with pytest.raises(ConfigurationMismatch) as caught:
        make()
    others = [rank for rank in range(seat.size) if rank != odd]
    assert isinstance(caught.value, UsageError)
    for ranks, phrase in (([odd], unusual), (others, usual)):
        verb = "has" if len(ranks) == 1 else "have"
        assert f"{rank_list(ranks)} {verb} {phrase}" in str(caught.value), caught.value
        told = [owners for found in caught.value.settings.values() for owners in found.values()]
        assert tuple(ranks) in told, caught.value.settings
    seat.same("error", str(caught.value))
    return caught.value


@check(least=2, what=CASES, who=("the first", "the last"))
def other_options(seat: Seat, what: str, who: str) -> None:
    usual, unusual, *phrases = CASES[what]
    odd = 0 if who == "the first" else seat.last
    error = expect(seat, odd, *phrases, lambda: wrap(**(unusual if seat.rank == odd else usual)))
    assert len(error.settings) == 1, "only what differs is told"
    twins = Twins(seat)
    twins.train(1)
    twins.check()


@check(least=2, algorithm=ALGORITHMS)
def other_algorithms(seat: Seat, algorithm: str) -> None:
    """Ranks compare their settings before the first operation of their algorithm."""
    mine = ALGORITHMS[algorithm]
    if seat.size % 2 and isinstance(mine, Layered):
        mine = Layered()
    for other in (AllReduce(), Crossover(), LocalSGD()):
        if type(other) is type(mine):
            continue
        names = [type(one).__name__ for one in (other, mine)]
        expect(seat, seat.last, *names, lambda: wrap(algorithm=mine if seat.rank == seat.last else other))  # noqa: B023
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == seat.size


@check(least=2)
def another_optimizer(seat: Seat) -> None:
    kind = torch.optim.Adam if seat.rank == seat.last else torch.optim.SGD
    expect(seat, seat.last, "optimizer=SGD", "optimizer=Adam", lambda: wrap(kind))


@check(least=2)
def changed_later(seat: Seat) -> None:
    optimizer = wrap()
    passes = 3 if seat.rank == 0 else 2
    name = "backward_passes_per_step"
    expect(seat, 0, f"{name}=2", f"{name}=3", lambda: optimizer.set_backward_passes_per_step(passes))


@check(least=2, algorithm=("allreduce", "caps", "crossover", "diloco", "local-sgd"))
def changes_that_are_refused_change_nothing(seat: Seat, algorithm: str) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    op = hvd.Sum if algorithm == "allreduce" else hvd.Average
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.25), op=op, algorithm=algorithm)

    def step() -> None:
        optimizer.zero_grad()
        weight.sum().backward()
        optimizer.step()

    step()
    with pytest.raises(ConfigurationMismatch):
        optimizer.set_backward_passes_per_step(3 if seat.rank == 0 else 2)
    step()
    more = torch.nn.Parameter(torch.ones(2 + (seat.rank == seat.last)))
    with pytest.raises(LayoutMismatch):
        optimizer.add_param_group({"params": [more]})
    step()
    assert len(optimizer.param_groups) == 1
    torch.testing.assert_close(weight.detach(), torch.full((3,), 1 - 0.75 * (seat.size if op == hvd.Sum else 1)))


@check(least=2, algorithm=("allreduce", "caps", "adasum"))
def copies_meet_at_their_first_step(seat: Seat, algorithm: str) -> None:
    options = {"op": hvd.Adasum} if algorithm == "adasum" else {"algorithm": algorithm}
    first, second = wrap(**options), wrap(torch.optim.Adam, **options)
    clone = copy.deepcopy(second if seat.rank == seat.last else first)
    expect(seat, seat.last, "optimizer=SGD", "optimizer=Adam", clone.step)
    for optimizer in (first, second):
        optimizer.step()
