"""Small networks of the source's two kinds: like AlexNet, with dropout before linear layers; and residual."""

from __future__ import annotations

import torch
from torch import nn


class Dropout(nn.Module):
    """Dropout of half of the inputs. It has its own generator, because the ranks of a simulation share torch's."""

    def __init__(self) -> None:
        super().__init__()
        self._generator: torch.Generator | None = None

    def begin(self, seed: int) -> None:
        """Set the seed of the following draws."""
        self._generator = torch.Generator().manual_seed(seed)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return values
        return 2 * values * (torch.rand(values.shape, generator=self._generator) < 0.5)


class Block(nn.Module):
    """Residual block of two convolutions with batch normalization."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        inner = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(values)))))
        return torch.relu(values + inner)


def _halved(into: int, out: int) -> list[nn.Module]:
    return [nn.Conv2d(into, out, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]


def make_network(kind: str, image_size: int, seed: int) -> nn.Sequential:
    """Return a network.

    Args:
        kind: "convolutional" (52,138 parameters for 28 x 28 images), or "residual" (13,154 for any).
        image_size: both sides of an image.
        seed: seed of the initial parameters.
    """
    torch.manual_seed(seed)
    if kind == "residual":
        return nn.Sequential(
            *(*_halved(1, 8), Block(8), Block(8)),
            *(*_halved(8, 16), Block(16), Block(16)),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)),
        )
    cells = image_size // 4
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), Dropout(), nn.Linear(16 * cells * cells, 64), nn.ReLU()),
        *(Dropout(), nn.Linear(64, 10)),
    )


def layers_of(model: nn.Module) -> list[str]:
    """Return the names of the weights of convolutions and linear layers, from first to last."""
    return [name for name, parameter in model.named_parameters() if parameter.dim() > 1]
