"""Optimizers and models as frameworks use them, on ranks that are threads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from algorithm_table import EXCHANGING, often

import sordino.torch as hvd
from sordino import sim
from sordino.algorithms import Algorithm, AllReduce, Crossover, Layered, LocalSGD, PushSum
from sordino.integrations.mean import MeanModel, settle
from sordino.integrations.optimizer import broadcast, wrapped

RANKS = 4
CASES: dict[str, Algorithm] = {
    **{name: often(one) for name, one in EXCHANGING.items()},
    "allreduce": AllReduce(),
    "allreduce-late": AllReduce(double_buffering=True),
    "layered": Layered(group_size=2),
    "local-sgd-overlap": LocalSGD(interval=2, overlap=True),
    "local-sgd-sharded": LocalSGD(interval=2, group_size=2, exchange="sharded"),
    "push-sum-overlap": PushSum(overlap=1),
    "crossover-buffers": Crossover(interval=2, buffers="average"),
}


def flat(module: torch.nn.Module) -> torch.Tensor:
    return torch.cat([one.detach().flatten() for one in module.parameters()])


def made(start: float = 0.5) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-start, start, parameter.numel()).view_as(parameter))
    return model


def trained(algorithm: Algorithm, looks: bool, closes: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the parameters of each rank after a training, and after `settle`."""

    def work() -> tuple[torch.Tensor, torch.Tensor]:
        model, mean = made(0.5 + hvd.rank()), MeanModel()
        broadcast(model)
        optimizer = wrapped(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), [model], algorithm)
        generator = torch.Generator().manual_seed(hvd.rank())

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            x = torch.randn(8, 6, generator=generator)
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            return loss

        for step in range(6):
            if closes:
                assert isinstance(optimizer.step(closure), torch.Tensor)
            else:
                closure()
                optimizer.step()
            if looks and step % 2 == 0:
                look(model, optimizer, mean)
        own = flat(model).clone()
        settle(model, [optimizer])
        model.cpu()  # as frameworks do, also with the gradients
        return own, flat(model).clone()

    found = sim.run(RANKS, work)
    return torch.stack([own for own, _ in found]), torch.stack([settled for _, settled in found])


def look(model: torch.nn.Module, optimizer: object, mean: MeanModel) -> None:
    """Evaluate and save, in inference mode as some frameworks do."""
    own, state = flat(model).clone(), mean.state_dict(model, [optimizer])
    with torch.inference_mode(), mean.inside(model, [optimizer]):
        if optimizer.may_replace_model:
            assert torch.equal(flat(model), torch.cat([state[name].flatten() for name, _ in model.named_parameters()]))
            all_ranks = hvd.allgather(flat(model)[None].clone())
            assert torch.equal(all_ranks, all_ranks[:1].expand_as(all_ranks))
        inner = mean.state_dict(model, [optimizer])
        assert all(torch.allclose(inner[name], state[name]) for name in state if optimizer.may_replace_model)
    assert torch.equal(flat(model), own)


@pytest.mark.parametrize("name", CASES)
def test_a_look_at_the_mean_does_not_change_the_training(name: str) -> None:
    (plain, settled), (looked, _) = (trained(CASES[name], looks) for looks in (False, True))
    assert torch.equal(plain, looked)
    assert torch.equal(settled, settled[:1].expand_as(settled))
    if name in EXCHANGING and not name.startswith(("caps", "layered")):
        assert torch.allclose(settled[0], plain.mean(0), atol=1e-6)


@pytest.mark.parametrize("name", ["allreduce-late", "layered", "local-sgd-sharded", "crossover-buffers"])
def test_a_closure_is_evaluated_before_the_step(name: str) -> None:
    """So training equals that of a loop without closures, also where the algorithm refuses closures."""
    assert torch.equal(trained(CASES[name], False)[0], trained(CASES[name], False, closes=False)[0])


def test_an_optimizer_that_evaluates_often_gets_the_closure() -> None:
    calls = []

    def work() -> None:
        model = made()
        optimizer = wrapped(torch.optim.LBFGS(model.parameters(), max_iter=3, lr=0.1), [model], AllReduce())

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(4, 6) * torch.arange(1.0, 5.0)[:, None]).square().mean()
            loss.backward()
            calls.append(hvd.rank())
            return loss

        optimizer.step(closure)

    sim.run(2, work)
    assert calls.count(0) == calls.count(1) > 1


def test_a_collected_state_needs_no_other_rank() -> None:
    def work() -> None:
        model = made()
        optimizer = wrapped(
            torch.optim.Adam(model.parameters()), [model], LocalSGD(interval=2, group_size=2, exchange="sharded")
        )
        model(torch.ones(2, 6) * torch.arange(1.0, 3.0)[:, None]).sum().backward()
        optimizer.step()
        whole = optimizer.state_dict()
        with optimizer.collected_state():
            if hvd.rank() == 0:
                state = optimizer.state_dict()
                assert state["sordino"] == whole["sordino"] and len(state["state"]) == len(list(model.parameters()))
        assert optimizer.state_dict()["sordino"]["steps"] == 1

    sim.run(2, work)


def test_tied_parameters_stay_tied_in_the_mean() -> None:
    def work() -> None:
        model = torch.nn.ModuleDict({"first": torch.nn.Linear(3, 3), "second": torch.nn.Linear(3, 3)})
        model["second"].weight = model["first"].weight
        optimizer = wrapped(torch.optim.SGD(model.parameters(), lr=0.1), [model], Crossover(interval=2))
        state = MeanModel().state_dict(model, [optimizer])
        assert state["first.weight"] is state["second.weight"] and len(state) == 4

    sim.run(2, work)


def test_an_evaluation_may_keep_results_in_buffers() -> None:
    """Afterwards the other buffers and the parameters are the rank's own again."""

    def work() -> tuple[float, float, float]:
        model, mean = torch.nn.Linear(2, 1, bias=False), MeanModel()
        model.register_buffer("best", torch.tensor(float("nan")))
        model.register_buffer("own", torch.tensor(float(hvd.rank())))
        optimizer = wrapped(torch.optim.SGD(model.parameters(), lr=0.1), [model], Crossover(interval=2))
        with torch.no_grad():
            model.weight.fill_(float(hvd.rank()))
        with torch.inference_mode(), mean.inside(model, [optimizer]):
            assert model.weight.tolist() == [[0.5, 0.5]] and model.own == 0.5
            model.best.fill_(3.0)
        return float(model.best), float(model.own), float(model.weight[0, 0])

    assert sim.run(2, work) == [(3.0, 0.0, 0.0), (3.0, 1.0, 1.0)]


def test_several_modules_have_names_of_their_own() -> None:
    def work() -> list[str]:
        modules = [made(), made()]
        parameters = [one for module in modules for one in module.parameters()]
        optimizer = wrapped(torch.optim.SGD(parameters, lr=0.1), modules, replace(AllReduce()))
        return list(optimizer._parameter_names.values())

    [names] = sim.run(1, work)
    assert names[0] == "0.0.weight" and names[-1] == "1.2.bias"
