"""Model of unusual tensors (`Odd`), its batches, and the loop in which checks of algorithms train it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

import sordino.torch as hvd
from checks.registry import Seat
from sordino.algorithms import Algorithm

Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
}


class Odd(torch.nn.Module):
    """Model with odd sizes, two dtypes, another memory order, a 0-d parameter and a parameter that is never used."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(4)

        def draw(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(*shape, generator=generator) / 3)

        self.first, self.bias = draw(7, 13), draw(7)
        self.image = torch.nn.Parameter(draw(2, 3, 5, 5).detach().contiguous(memory_format=torch.channels_last))
        self.scale = torch.nn.Parameter(torch.tensor(0.7))
        self.wide = torch.nn.Parameter(draw(11, 7).detach().double())
        self.unused = draw(5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(inputs @ self.first.T + self.bias) * self.scale + self.image.mean(dim=(2, 3)).sum()
        return (hidden.double() @ self.wide.T).sum(1)


def wrap(model: torch.nn.Module, algorithm: Algorithm, make: Make = OPTIMIZERS["momentum"]) -> hvd.DistributedOptimizer:
    return hvd.DistributedOptimizer(make(list(model.parameters())), model.named_parameters(), algorithm=algorithm)


def batch(rank: int, turn: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * turn + rank)
    return torch.randn(6, 13, generator=generator), torch.randn(6, generator=generator, dtype=torch.float64)


def step(seat: Seat, model: torch.nn.Module, optimizer: Any, turn: int) -> None:
    inputs, targets = batch(seat.rank, turn)
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()


def train(seat: Seat, algorithm: Algorithm, steps: int, make: Make = OPTIMIZERS["momentum"]) -> Odd:
    model = Odd()
    optimizer = wrap(model, algorithm, make)
    for turn in range(steps):
        step(seat, model, optimizer, turn)
    return model


def near(one: torch.nn.Module, other: torch.nn.Module) -> None:
    for (name, mine), theirs in zip(one.named_parameters(), other.parameters()):
        torch.testing.assert_close(mine, theirs, atol=2e-6, rtol=2e-5, msg=lambda text, name=name: f"{name}: {text}")


def divisors(size: int) -> list[int]:
    return [k for k in range(1, size + 1) if size % k == 0]


def twin_of(model: Odd, optimizer: Any, algorithm: Algorithm, make: Make) -> tuple[Odd, Any]:
    """Return a copy of the model, and an optimizer of it that has loaded the state of the other."""
    twin = Odd()
    twin.load_state_dict(model.state_dict())
    resumed = wrap(twin, algorithm, make)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return twin, resumed


def same_models(one: Odd, other: Odd) -> bool:
    return all(torch.equal(mine, theirs) for mine, theirs in zip(one.parameters(), other.parameters()))
