"""A rank that trains alone from a state of several ranks: values that only exchanges need are not saved again, as they
would no longer fit the parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import sordino.torch as hvd
from sordino import sim
from sordino.algorithms import Algorithm, AllReduce, CaPS, Crossover, DiLoCo, ElasticAveraging, LocalSGD, NoLoCo
from sordino.codecs import Int8

STATES: dict[str, tuple[Algorithm, str]] = {
    "outer parameters": (DiLoCo(8), "outer"),
    "own outer parameters": (NoLoCo(8), "outer"),
    "center": (ElasticAveraging(8), "centre"),
    "models after an averaging": (LocalSGD(8, aggregate="gradients"), "outer"),
    "encoded averagings": (LocalSGD(8, compression=Int8()), "outer"),
    "distances": (Crossover(interval=1, compression=Int8()), "distances"),
    "averages of the step before": (AllReduce(double_buffering=True), "gradients"),
    "skipped items": (CaPS(), "skipped"),
}
"""Algorithms, each with a key of the state that only exchanges need."""


def train(algorithm: Algorithm, state: Any, steps: int) -> Any:
    model = torch.nn.Linear(3, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), algorithm=algorithm
    )
    if state is not None:
        optimizer.load_state_dict(copy.deepcopy(state))
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(3)).sum().backward()
        optimizer.step()
    return optimizer.state_dict()


@pytest.mark.parametrize("kind", STATES)
def test_steps_alone_end_the_state_of_exchanges(kind: str) -> None:
    algorithm, key = STATES[kind]
    state = sim.run(2, train, algorithm, None, 3)[0]
    assert len(state["sordino"][key]) > 0
    [unused] = sim.run(1, train, algorithm, state, 0)
    assert len(unused["sordino"][key]) > 0  # loaded and saved without a step, it is the same state
    [alone] = sim.run(1, train, algorithm, state, 1)
    assert len(alone["sordino"].get(key, ())) == 0
    again = sim.run(2, train, algorithm, alone, 1)
    assert len(again[0]["sordino"][key]) > 0
