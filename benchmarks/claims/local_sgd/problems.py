"""Problems of local models: classification of images, and doubling of their resolution."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Protocol

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from claims.training import accuracy_of, linear_layers, load

_PATCH = 16  # side of the training patches of super-resolution, in pixels


class Problem(Protocol):
    """A network with its optimizer, loss and score."""

    def model(self, seed: int) -> nn.Module:
        """Return the network with the initial parameters of a seed."""

    def optimizer(self, parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        """Return the source's optimizer."""

    def loss(self, model: nn.Module, rows: torch.Tensor, draw: int) -> torch.Tensor:
        """Return the mean loss of the training images `rows`; `draw` seeds other random choices."""

    def score(self, model: nn.Module, part: str) -> float:
        """Return the score of a model on the images of "validation" or "test", in percent or dB."""


class Classification:
    """Classification of images by three linear layers, with plain SGD."""

    def __init__(self, data: str, images: int, held_out: int) -> None:
        self._parts = load(data, images, held_out)

    def model(self, seed: int) -> nn.Module:
        """Return the network with the initial parameters of a seed."""
        return linear_layers(self._parts["train"][0].shape[2], 64, seed)

    def optimizer(self, parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        """Return SGD, as in the source's equation 1."""
        return torch.optim.SGD(parameters, lr=lr)

    def loss(self, model: nn.Module, rows: torch.Tensor, draw: int) -> torch.Tensor:
        """Return the mean cross-entropy of these images."""
        images, labels = self._parts["train"]
        return functional.cross_entropy(model(images[rows]), labels[rows])

    def score(self, model: nn.Module, part: str) -> float:
        """Return the accuracy in percent."""
        return 100 * accuracy_of(model, self._parts[part])


class Resolution:
    """Doubling of resolution by a small EDSR, with Adam, trained on patches and tested on whole images."""

    def __init__(self, data: str, images: int, held_out: int) -> None:
        parts = {name: part[0] for name, part in load(data, images, held_out).items()}
        least, most = parts["train"].min(), parts["train"].max()  # undoes the normalization of pixels
        self._images = {name: (part - least) / (most - least) for name, part in parts.items()}

    def model(self, seed: int) -> nn.Module:
        """Return the network with the initial parameters of a seed."""
        torch.manual_seed(seed)
        return EDSR()

    def optimizer(self, parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        """Return Adam."""
        return torch.optim.Adam(parameters, lr=lr)

    def loss(self, model: nn.Module, rows: torch.Tensor, draw: int) -> torch.Tensor:
        """Return the mean absolute error of patches of these images."""
        images = self._images["train"][rows]
        side = min(_PATCH, images.shape[2])
        places = np.random.Generator(np.random.PCG64(draw)).integers((images.shape[2] - side) // 2 + 1, size=2) * 2
        small = _smaller(images)[:, :, places[0] // 2 :, places[1] // 2 :][:, :, : side // 2, : side // 2]
        wanted = images[:, :, places[0] :, places[1] :][:, :, :side, :side]
        return functional.l1_loss(model(small), wanted)

    @torch.no_grad()
    def score(self, model: nn.Module, part: str) -> float:
        """Return the mean peak signal-to-noise ratio of the first thousand images, in dB."""
        images = self._images[part][:1000]
        found = torch.cat([model(_smaller(some)) for some in images.split(100)]).clamp(0, 1)
        errors = (found - images).square().mean(dim=(1, 2, 3)).clamp(min=1e-10)
        return float((-10 * errors.log10()).mean())


def _smaller(images: torch.Tensor) -> torch.Tensor:
    """Return images of half the resolution, by bicubic interpolation as in the source."""
    return functional.interpolate(images, scale_factor=0.5, mode="bicubic", antialias=True)


class EDSR(nn.Module):
    """EDSR (Lim et al. 2017) with 2 residual blocks of 16 channels for gray images: 21,185 parameters."""

    def __init__(self, channels: int = 16, blocks: int = 2) -> None:
        super().__init__()
        self.head = nn.Conv2d(1, channels, 3, padding=1)
        self.blocks = nn.ModuleList(_Block(channels) for _ in range(blocks))
        self.last = nn.Conv2d(channels, channels, 3, padding=1)
        self.upsample = nn.Conv2d(channels, 4 * channels, 3, padding=1)
        self.tail = nn.Conv2d(channels, 1, 3, padding=1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return images of twice the resolution."""
        begin = values = self.head(images)
        for block in self.blocks:
            values = block(values)
        values = self.last(values) + begin
        found: torch.Tensor = self.tail(functional.pixel_shuffle(self.upsample(values), 2))
        return found


class _Block(nn.Module):
    """Residual block of two convolutions, without batch normalization."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(channels, channels, 3, padding=1)
        self.two = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values plus the output of the convolutions."""
        added: torch.Tensor = self.two(functional.relu(self.one(values)))
        return values + added


PROBLEMS: dict[str, Callable[[str, int, int], Problem]] = {"classification": Classification, "resolution": Resolution}


@cache
def problem_of(name: str, data: str, images: int, held_out: int) -> Problem:
    """Return the problem, created once."""
    return PROBLEMS[name](data, images, held_out)
