"""A model with buffers, and a linear one with data for it, for tests of `hvd.elastic`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import sordino.torch as hvd
from sordino.torch.elastic import TorchState

Values = list[torch.Tensor]
WIDTH = 3  # of the rows of data


def model_of(seed: int) -> torch.nn.Module:
    layers = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return layers.double()


def values(model: torch.nn.Module) -> Values:
    return [value.clone() for value in model.state_dict().values()]


def equal(mine: Values, others: Values) -> bool:
    return len(mine) == len(others) and all(torch.equal(a, b) for a, b in zip(mine, others))


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.05)


def take_step(state: TorchState, number: int, fault: bool = False) -> None:
    generator = torch.Generator().manual_seed(100 * number + hvd.rank())
    state.optimizer.zero_grad()
    state.model(torch.randn(6, 3, generator=generator, dtype=torch.float64)).square().mean().backward()
    if fault:
        raise hvd.HorovodInternalError("a fault")
    state.optimizer.step()


def data(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    inputs = torch.randn(length, WIDTH, generator=generator, dtype=torch.float64)
    return inputs, torch.randn(length, 1, generator=generator, dtype=torch.float64)


def line_of(seed: int) -> torch.nn.Linear:
    weight = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    model = torch.nn.Linear(WIDTH, 1, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(weight)
        model.bias.fill_(seed)
    return model


def loss_of(model: torch.nn.Module, rows: Sequence[int], all_rows: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    inputs, targets = all_rows
    return (model(inputs[list(rows)]) - targets[list(rows)]).square().mean()


def sgd(model: torch.nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def copied(model: torch.nn.Module) -> Values:
    return [parameter.detach().clone() for parameter in model.parameters()]
