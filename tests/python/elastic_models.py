"""A small model with buffers, and steps of it, for tests of `hvd.elastic`."""

from __future__ import annotations

import torch

import sordino.torch as hvd
from sordino.torch.elastic import TorchState

Values = list[torch.Tensor]


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


def take_step(state: TorchState, number: int) -> None:
    generator = torch.Generator().manual_seed(100 * number + hvd.rank())
    state.optimizer.zero_grad()
    state.model(torch.randn(6, 3, generator=generator, dtype=torch.float64)).square().mean().backward()
    state.optimizer.step()
