"""Names of earlier versions work, with a warning, and checkpoints that have them load."""

from __future__ import annotations

import pytest
import torch

import sordino.torch as hvd
from sordino import algorithms, sim
from sordino.algorithms import CaPS, ElasticAveraging, PushSum, SegmentedGossip, resolve
from sordino.cli.app import main

FORMER = {"elasticaveraging": ElasticAveraging, "pushsum": PushSum, "segmentedgossip": SegmentedGossip}


@pytest.mark.parametrize("name", FORMER)
def test_a_former_name_works_with_a_warning(name: str) -> None:
    with pytest.warns(FutureWarning, match=f"algorithm '{name}' is called '.*-.*' now"):
        assert resolve(name) == FORMER[name]()


def test_the_simulator_takes_a_former_name() -> None:
    words = ["simulate", "--algorithm", "pushsum", "--data", "none", "--steps", "2", "--quiet", "--processes", "1"]
    with pytest.warns(FutureWarning, match="'pushsum' is called 'push-sum' now"):
        assert main(words) == 0


def test_a_former_class_works_with_a_warning() -> None:
    with pytest.warns(FutureWarning, match="ParameterSkipping is called CaPS now"):
        assert algorithms.ParameterSkipping is CaPS


def test_a_checkpoint_with_a_former_name_loads() -> None:
    def train() -> tuple[int, int]:
        weight = torch.nn.Parameter(torch.ones(4))
        first, other = (
            hvd.DistributedOptimizer(torch.optim.SGD([one], lr=0.1), [("weight", one)], algorithm=CaPS())
            for one in (weight, torch.nn.Parameter(torch.ones(4)))
        )
        weight.sum().backward()
        first.step()
        state = first.state_dict()
        assert state["sordino"]["algorithm"] == "CaPS"
        state["sordino"]["algorithm"] = "ParameterSkipping"
        other.load_state_dict(state)
        return first._strategy.steps, other._strategy.steps  # type: ignore[attr-defined]

    assert sim.run(2, train) == [(1, 1)] * 2
