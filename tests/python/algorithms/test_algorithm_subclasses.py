"""An algorithm derived from one of ours is treated like its base everywhere: in optimizers, simulations and costs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from lockstep_cases import CHOICES, job_of, silent

import sordino.torch as hvd
from sordino import plan, sim
from sordino.algorithms import Algorithm, LocalSGD, names, resolve
from sordino.simulate import lockstep

RATES = plan.Rates(None, plan.Line(1e-4, 1e-8), 0.0, hop=1e-4)


def derived(algorithm: Algorithm) -> Algorithm:
    """Return the same algorithm as an object of a user's class."""
    kind = type("Mine", (type(algorithm),), {})
    one = object.__new__(kind)
    one.__dict__.update(algorithm.__dict__)
    return one


def steps_of(algorithm: Algorithm) -> type:
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), algorithm=algorithm)
    weight.sum().backward()
    optimizer.step()
    assert f"{type(algorithm).__name__}(" in repr(optimizer)
    return type(optimizer._strategy)


@pytest.mark.parametrize("name", names())
def test_an_optimizer_takes_its_steps(name: str) -> None:
    base = resolve(name)
    mine = derived(base)
    assert type(mine) is not type(base) and isinstance(mine, type(base))
    assert sim.run(2, steps_of, mine) == sim.run(2, steps_of, base)


@pytest.mark.parametrize("name", CHOICES)
def test_a_simulation_runs_it(name: str) -> None:
    wanted, found = (lockstep.run(job_of(one), silent) for one in (CHOICES[name], derived(CHOICES[name])))
    assert found.final == wanted.final and found.seconds == wanted.seconds
    assert np.array_equal(found.record.computing, wanted.record.computing)


@pytest.mark.parametrize("name", names())
def test_its_costs_are_known(name: str) -> None:
    wanted, found = (plan.cost_of(one, [0, 0, 1, 1], ["w"], [1000]) for one in (resolve(name), derived(resolve(name))))
    assert found.phases and found.communication(RATES) == wanted.communication(RATES)
    assert found.sent() == wanted.sent()


def train_in_groups(algorithm: LocalSGD) -> list[float]:
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), algorithm=algorithm)
    seen = []
    for _ in range(4):
        optimizer.zero_grad()
        (weight.sum() * float(hvd.rank())).backward()
        optimizer.step()
        seen.append(weight[0].item())
    return seen


def test_local_sgd_of_ones_own_averages_as_it_says() -> None:
    class Mine(LocalSGD):
        pass

    first, second = sim.run(2, train_in_groups, Mine(interval=2))
    assert (first, second) == ([0.0, -1.0, -1.0, -2.0], [-1.0, -1.0, -2.0, -2.0])
