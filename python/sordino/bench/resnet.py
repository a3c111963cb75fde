"""Model with ResNet-50's parameters and an adjustable amount of computation, for benchmarks of communication."""

from __future__ import annotations

import math
import time
from typing import Any

import torch


def resnet50_shapes(narrow: int = 1) -> list[tuple[str, tuple[int, ...]]]:
    """Return names and shapes of ResNet-50's 161 parameters, in the order of its modules.

    Args:
        narrow: divisor of all numbers of channels.
    """
    shapes: list[tuple[str, tuple[int, ...]]] = []

    def conv_and_norm(conv: str, norm: str, out: int, into: int, kernel: int) -> None:
        shapes.append((f"{conv}.weight", (out, into, kernel, kernel)))
        shapes.extend((f"{norm}.{part}", (out,)) for part in ("weight", "bias"))

    into = 64 // narrow
    conv_and_norm("conv1", "bn1", into, 3, 7)
    for stage, (blocks, wide) in enumerate(zip((3, 4, 6, 3), (64, 128, 256, 512), strict=True), start=1):
        width = wide // narrow
        for block in range(blocks):
            prefix = f"layer{stage}.{block}"
            conv_and_norm(f"{prefix}.conv1", f"{prefix}.bn1", width, into, 1)
            conv_and_norm(f"{prefix}.conv2", f"{prefix}.bn2", width, width, 3)
            conv_and_norm(f"{prefix}.conv3", f"{prefix}.bn3", 4 * width, width, 1)
            if block == 0:
                conv_and_norm(f"{prefix}.downsample.0", f"{prefix}.downsample.1", 4 * width, into, 1)
            into = 4 * width
    shapes += [("fc.weight", (1000 // narrow, into)), ("fc.bias", (1000 // narrow,))]
    return shapes


class Work:
    """Computation in pieces: products of small matrices that stay in the cache."""

    def __init__(self) -> None:
        self._left, self._right = torch.rand(96, 96), torch.rand(96, 96)
        self._product = torch.empty(96, 96)

    def do(self, pieces: int) -> None:
        for _ in range(pieces):
            torch.mm(self._left, self._right, out=self._product)

    def piece_seconds(self) -> float:
        """Measure the shortest time of one piece on this machine, in seconds."""
        best = math.inf
        for _ in range(20):
            begin = time.perf_counter()
            self.do(20)
            best = min(best, (time.perf_counter() - begin) / 20)
        return best


class _Layer(torch.autograd.Function):
    """Identity on a signal, whose backward computes for a while and makes a gradient of the parameter's size."""

    @staticmethod
    def forward(ctx: Any, signal: torch.Tensor, parameter: torch.Tensor, work: Work, pieces: int, value: float) -> Any:
        ctx.shape, ctx.work, ctx.pieces, ctx.value = parameter.shape, work, pieces, value
        return signal.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        ctx.work.do(ctx.pieces)
        return grad, torch.full(ctx.shape, ctx.value), None, None, None


class Model(torch.nn.Module):
    """ResNet-50's parameters in sequence. Backward yields their gradients one by one, from the last layer to the first.

    Args:
        pieces: total pieces of work, spread evenly over the parameters with more than one dimension.
        value: value of every element of every gradient.
        narrow: as in `resnet50_shapes`.
    """

    def __init__(self, work: Work, pieces: int, value: float, narrow: int = 1) -> None:
        super().__init__()
        self._work, self._value = work, value
        named = resnet50_shapes(narrow)
        self._names = [name.replace(".", "_") for name, _ in named]
        for name, (_, shape) in zip(self._names, named, strict=True):
            self.register_parameter(name, torch.nn.Parameter(torch.full(shape, 0.01)))
        heavy = [len(shape) > 1 for _, shape in named]
        self._pieces = [0] * len(named)
        done = seen = 0
        for index, counts in enumerate(heavy):
            if counts:
                seen += 1
                self._pieces[index] = pieces * seen // sum(heavy) - done
                done += self._pieces[index]

    def forward(self, signal: torch.Tensor) -> torch.Tensor:
        for name, pieces in zip(self._names, self._pieces, strict=True):
            signal = _Layer.apply(signal, self.get_parameter(name), self._work, pieces, self._value)  # type: ignore[no-untyped-call]
        return signal
