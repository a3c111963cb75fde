"""Models of gpu_step: a ResNet-50, and its parameters alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import sordino.torch as hvd
from sordino.bench.resnet import Model, Work


class _Bottleneck(nn.Module):
    def __init__(self, into: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(into, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or into != 4 * width:
            self.downsample = nn.Sequential(
                nn.Conv2d(into, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = torch.relu(self.bn1(self.conv1(x)))
        found = torch.relu(self.bn2(self.conv2(found)))
        return torch.relu(self.bn3(self.conv3(found)) + self.downsample(x))


class ResNet50(nn.Module):
    """ResNet-50 (He et al. 2016) with torchvision's names; `narrow` divides all numbers of channels."""

    def __init__(self, narrow: int = 1) -> None:
        super().__init__()
        into = 64 // narrow
        self.conv1, self.bn1 = nn.Conv2d(3, into, 7, 2, 3, bias=False), nn.BatchNorm2d(into)
        for stage, (blocks, width) in enumerate(zip((3, 4, 6, 3), (64, 128, 256, 512), strict=True), start=1):
            layers = []
            for block in range(blocks):
                layers.append(_Bottleneck(into, width // narrow, 2 if block == 0 and stage > 1 else 1))
                into = 4 * width // narrow
            self.add_module(f"layer{stage}", nn.Sequential(*layers))
        self.fc = nn.Linear(into, 1000 // narrow)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.max_pool2d(torch.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        for stage in range(1, 5):
            x = self.get_submodule(f"layer{stage}")(x)
        found: torch.Tensor = self.fc(x.mean(dim=(2, 3)))
        return found


class _Layer(torch.autograd.Function):
    """Identity of a signal. Backward makes a gradient of the parameter's shape, filled with the signal."""

    @staticmethod
    def forward(ctx: Any, signal: torch.Tensor, parameter: torch.Tensor) -> Any:
        ctx.save_for_backward(signal, parameter)
        return signal.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        signal, parameter = ctx.saved_tensors
        return grads[0], signal.expand_as(parameter).contiguous()


class Parameters(Model):
    """ResNet-50's parameters without computation."""

    def __init__(self, narrow: int = 1) -> None:
        super().__init__(Work(), 0, 0.0, narrow)

    def forward(self, signal: torch.Tensor) -> torch.Tensor:
        for parameter in self.parameters():
            signal = _Layer.apply(signal, parameter)  # type: ignore[no-untyped-call]
        return signal


@dataclass(frozen=True)
class Case:
    """A kind of step: name, model, inputs, and whether autocast is used."""

    name: str
    model: Callable[[], nn.Module]
    inputs: Callable[[torch.device], torch.Tensor]
    autocast: bool


def cases(batch: int, side: int = 224, narrow: int = 1) -> list[Case]:
    """Return both kinds of step. Each rank draws its own `batch` images of `side` x `side` pixels."""

    def images(device: torch.device) -> torch.Tensor:
        torch.manual_seed(1 + hvd.rank())
        return torch.randn(batch, 3, side, side, device=device).contiguous(memory_format=torch.channels_last)

    def signal(device: torch.device) -> torch.Tensor:
        return torch.full((1,), 1e-3 * (1 + hvd.rank()), device=device, requires_grad=True)

    return [
        Case("ResNet-50", lambda: ResNet50(narrow), images, True),
        Case("parameters", lambda: Parameters(narrow), signal, False),
    ]
