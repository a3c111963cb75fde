"""States of wrapped optimizers in `torch.distributed.checkpoint`, and states of other algorithms."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checks.models import batch, loss_of, make_model
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import sordino.torch as hvd
import sordino.torch.dcp
from sordino import sim
from sordino.algorithms import (
    Algorithm,
    AllReduce,
    CaPS,
    Crossover,
    DiLoCo,
    ElasticAveraging,
    LocalSGD,
    PushSum,
)

Pair = tuple[torch.nn.Module, hvd.DistributedOptimizer]


def wrapped(algorithm: Algorithm, seed: int = 3, **options: object) -> Pair:
    model = make_model("small", seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return model, hvd.DistributedOptimizer(optimizer, model.named_parameters(), algorithm=algorithm, **options)


def train(model: torch.nn.Module, optimizer: hvd.DistributedOptimizer, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss_of(model, *batch(4, 100 * hvd.rank() + step)).backward()
        optimizer.step()


ALGORITHMS = [
    Crossover(segments="model"),
    ElasticAveraging(interval=2),
    LocalSGD(interval=3),
    CaPS(),
    AllReduce(double_buffering=True),
    AllReduce(),
]


ENCODED = [DiLoCo(interval=2, compression="sign"), LocalSGD(interval=2, compression="twobit")]


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, *ENCODED, LocalSGD(interval=2, group_size=2)], ids=str)
def test_torchs_checkpoints_keep_the_algorithms_state(algorithm: Algorithm, tmp_path: Path) -> None:
    for flat in (False, True):
        round_trip(algorithm, flat, tmp_path / str(flat))


def test_torchs_checkpoints_keep_the_residuals_of_gradients(tmp_path: Path) -> None:
    for flat in (False, True):
        round_trip(AllReduce(), flat, tmp_path / str(flat), compression="sign")


def round_trip(algorithm: Algorithm, flat: bool, tmp_path: Path, **settings: object) -> None:
    """Save to a file and load into optimizers that have not taken a step; they continue like the saved ones."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)

    def job() -> None:
        model, optimizer = wrapped(algorithm, **settings)
        train(model, optimizer, 5)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        weights, state = get_state_dict(model, optimizer, options=options)
        for parameter, then in zip(model.parameters(), before):
            assert torch.equal(parameter, then)
        folder = str(tmp_path / str(hvd.rank()))
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder, no_dist=True)
        twin, loaded = wrapped(algorithm, seed=4, **settings)
        into = dict(zip(("model", "optimizer"), get_state_dict(twin, loaded, options=options)))
        dcp.load(into, checkpoint_id=folder, no_dist=True)
        set_state_dict(
            twin, loaded, model_state_dict=into["model"], optim_state_dict=into["optimizer"], options=options
        )
        train(model, optimizer, 4, first=5)
        train(twin, loaded, 4, first=5)
        for one, other in zip(model.parameters(), twin.parameters()):
            assert torch.equal(one, other)

    sim.run(2, job)


def test_torchs_checkpoints_take_no_step_of_an_algorithm() -> None:
    """One rank alone gets the state of an optimizer without one, and does not wait for the others."""

    def job() -> None:
        model, optimizer = wrapped(Crossover())
        before = [parameter.detach().clone() for parameter in model.parameters()]
        torch.optim.lr_scheduler.ConstantLR(optimizer)  # this wraps step()
        if hvd.rank() == 0:
            state = get_optimizer_state_dict(model, optimizer)
            assert set(state["state"]) == {name for name, _ in model.named_parameters()}
        assert optimizer.state_dict()["sordino"] == {"algorithm": "Crossover", "steps": 0, "round": 0}
        for parameter, then in zip(model.parameters(), before):
            assert torch.equal(parameter, then)

    sim.run(2, job)


def test_a_large_state_is_not_written_once_for_each_parameter() -> None:
    def job() -> None:
        model = torch.nn.Sequential(torch.nn.Linear(400, 400), torch.nn.Linear(400, 400))
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), algorithm=ElasticAveraging())
        model(torch.ones(1, 400)).sum().backward()
        optimizer.step()
        with pytest.raises(hvd.UsageError, match="flatten_optimizer_state_dict=False"):
            get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
        state = get_optimizer_state_dict(model, optimizer)
        set_optimizer_state_dict(model, optimizer, state)

    sim.run(2, job)


def test_the_first_group_may_have_no_parameters() -> None:
    def job() -> None:
        def made() -> Pair:
            model = make_model("small", 3)
            adam = torch.optim.Adam([{"params": []}, {"params": list(model.parameters())}], lr=0.1)
            return model, hvd.DistributedOptimizer(adam, model.named_parameters(), algorithm=Crossover())

        model, optimizer = made()
        train(model, optimizer, 2)
        state = get_optimizer_state_dict(model, optimizer)
        model, optimizer = made()
        set_optimizer_state_dict(model, optimizer, state)
        assert optimizer.state_dict()["sordino"]["steps"] == 2

    sim.run(2, job)


@pytest.mark.parametrize("by_torch", [False, True])
def test_the_state_of_another_algorithm_is_refused(by_torch: bool) -> None:
    def job() -> None:
        model, optimizer = wrapped(Crossover())
        train(model, optimizer, 2)
        state = get_optimizer_state_dict(model, optimizer) if by_torch else optimizer.state_dict()
        for algorithm in (PushSum(), AllReduce(), AllReduce(double_buffering=True)):
            twin, other = wrapped(algorithm)
            with pytest.raises(hvd.UsageError, match=r"saved by Crossover.*uses (PushSum|AllReduce)"):
                if by_torch:
                    set_optimizer_state_dict(twin, other, state)
                else:
                    other.load_state_dict(state)
        twin, same = wrapped(Crossover(interval=3))
        if by_torch:
            set_optimizer_state_dict(twin, same, state)
        else:
            same.load_state_dict(state)
            del state["sordino"]
            wrapped(AllReduce())[1].load_state_dict(state)
        assert same.state_dict()["sordino"]["steps"] == 2

    sim.run(2, job)


def test_a_state_without_a_name_is_of_an_earlier_version() -> None:
    def job() -> None:
        _, optimizer = wrapped(Crossover())
        state = optimizer.state_dict()
        assert state["sordino"].pop("algorithm") == "Crossover"
        state["sordino"]["steps"] = 7
        optimizer.load_state_dict(state)
        assert optimizer.state_dict()["sordino"]["steps"] == 7

    sim.run(2, job)


def test_torch_has_the_functions_that_are_recognised() -> None:
    module = importlib.import_module(sordino.torch.dcp.MODULE)
    assert all(callable(getattr(module, name)) for name in sordino.torch.dcp.FUNCTIONS)
