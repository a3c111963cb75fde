"""Small models, equal in any thread, and every optimizer of torch.optim."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

CLASSES = 3
FEATURES = 6


class Tied(nn.Module):
    """One weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.second = nn.Linear(FEATURES, FEATURES)
        self.second.weight = self.first.weight
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Branches(nn.Module):
    """Each call uses one branch; no rank uses `never`."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(FEATURES, FEATURES)
        self.left = nn.Linear(FEATURES, CLASSES)
        self.right = nn.Linear(FEATURES, CLASSES)
        self.never = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        return (self.left if left else self.right)(torch.tanh(self.trunk(x)))


class Image(nn.Module):
    """Convolutions on rows that are reshaped to images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, (2, 2))
        self.deep = nn.Conv2d(4, 5, (1, 2))
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = x.view(-1, 1, 2, 3).contiguous(memory_format=torch.channels_last)
        return self.head(self.deep(torch.tanh(self.conv(image))).flatten(1))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "small": lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)),
    "tied": Tied,
    "branches": Branches,
    "conv": Image,
    "matrices": lambda: nn.Sequential(nn.Linear(FEATURES, 8, bias=False), nn.Tanh(), nn.Linear(8, CLASSES, bias=False)),
}


def fill(model: nn.Module, seed: int) -> nn.Module:
    """Fill the parameters with random numbers, without torch's generator: all threads share it, so models would
    differ."""
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.from_numpy(rng.standard_normal(tuple(parameter.shape)) * 0.4))
    return model


def make_model(kind: str, seed: int, dtype: torch.dtype = torch.float64) -> nn.Module:
    return fill(MODELS[kind]().to(dtype), seed)


def batch(rows: int, seed: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng([seed, 99])
    x = torch.from_numpy(rng.standard_normal((rows, FEATURES))).to(dtype)
    return x, torch.from_numpy(rng.standard_normal((rows, CLASSES))).to(dtype)


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor, *arguments: object) -> torch.Tensor:
    """Return a mean over rows, so that the mean over equal parts of a batch is the mean of the batch."""
    return ((model(x, *arguments) - y) ** 2).mean()


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, rows: int = 6) -> None:
    optimizer.zero_grad()
    dtype = next(model.parameters()).dtype
    loss_of(model, *batch(rows, seed, dtype)).backward()
    optimizer.step()


def part(tensors: Sequence[torch.Tensor], rank: int, size: int) -> list[torch.Tensor]:
    """Return this rank's equal share of the rows."""
    each = len(tensors[0]) // size
    return [tensor[rank * each : (rank + 1) * each] for tensor in tensors]


def _plain(kind: type, **options: object) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: kind(model.parameters(), **options)


_OPTIONS = {
    "SGD": {"lr": 0.1},
    "Adagrad": {"lr": 0.1},
    "Rprop": {"lr": 0.01},
    "ASGD": {"lr": 0.1},
    "Muon": {"lr": 0.01},
}
_OTHERWISE = {"Optimizer", "LBFGS", "SparseAdam"}  # the base class, and optimizers with checks of their own
EVERY: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    name: _plain(kind, **_OPTIONS.get(name, {"lr": 0.01}))
    for name, kind in sorted(vars(torch.optim).items())
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and name not in _OTHERWISE
}
MANY: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": EVERY["SGD"],
    "momentum": _plain(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam amsgrad": _plain(torch.optim.Adam, lr=0.01, amsgrad=True),
    "AdamW": EVERY["AdamW"],
    "RMSprop": _plain(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "Adagrad": EVERY["Adagrad"],
    "Rprop": EVERY["Rprop"],
    "two groups": lambda model: torch.optim.SGD(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1], "lr": 0.05},
            {"params": [p for p in model.parameters() if p.dim() <= 1], "momentum": 0.8},
        ],
        lr=0.1,
        momentum=0.5,
    ),
}


def model_for(label: str) -> str:
    return "matrices" if label == "Muon" else "small"
