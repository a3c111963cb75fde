"""Speedup by the number of processes: computation is measured on one core here, and communication is predicted.

Scaling depends on the ratio of communication to computation, which the source does not give. So all communication is
slowed down (or sped up) by one factor. With it, synchronous SGD flattens at the same number of processes as the
source's. Local SGD is judged with that factor.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn

from claims.claim import Run
from claims.evidence import FAILS, HOLDS, OPEN, Evidence
from claims.local_sgd.timed import NAMES
from claims.local_sgd.worker import SETS
from sordino.algorithms import Algorithm, AllReduce, LocalSGD
from sordino.plan import Cost, Line, Rates, cost_of
from sordino.report import Results

COUNTS = (1, 2, 4, 8, 16, 32, 64)
FLAT = 1.25  # the speedup is flat if twice the processes multiply it by less
_OFF = 0.08  # largest relative error of predictions in Figures 6 and 10; smaller differences are not told apart
_HALVINGS = 60  # steps of the bisection for a slowdown


@dataclass(frozen=True)
class Scaling:
    """Strong scaling of one training.

    Attributes:
        set: name of the parameters, a key of `worker.SETS`.
        models: P.
        interval: I.
        batch: B, the mini-batch of a local model; synchronous SGD has mini-batches of P B.
        flat: processes at which the source's synchronous SGD has flattened.
        linear: processes up to which the source's local SGD is almost linear.
    """

    set: str
    models: int
    interval: int
    batch: int
    flat: int
    linear: int

    def ask(self, quick: bool) -> Generator[Sequence[Run], list[Results], list[Results]]:
        """Ask for the time of computation."""
        settings = {"set": self.set, "batches": [1, 2] if quick else [1, 4, 16], "rounds": 2 if quick else 5}
        return (yield [Run("claims.local_sgd.scaling:computing", settings, alone=True)])

    def found(self, rates: Rates, line: Results) -> tuple[list[Evidence], Results]:
        """Return the statements that both figures share, and the speedups, with communication like the source's."""
        factor = self.like_the_source(rates, line)
        speedups = self.speedups(slower(rates, factor), line)
        return judge(self, speedups), {"speedups": speedups, "slower": factor}

    def like_the_source(self, rates: Rates, line: Results) -> float:
        """Return the slowdown of communication with which synchronous SGD flattens where the source's does."""
        least, most = 0.0, 1e6
        for _ in range(_HALVINGS):
            middle = (least + most) / 2
            before, after = (
                self._seconds("synchronous", n, slower(rates, middle), line) for n in (self.flat // 2, self.flat)
            )
            least, most = (middle, most) if before / after > FLAT else (least, middle)
        return most

    def speedups(self, rates: Rates, line: Results) -> dict[str, list[float]]:
        """Return the throughput over that of one process, for all COUNTS, by the keys of NAMES."""
        seconds = {way: [self._seconds(way, count, rates, line) for count in COUNTS] for way in NAMES}
        return {way: [ones[0] / one for one in ones] for way, ones in seconds.items()}

    def _seconds(self, way: str, count: int, rates: Rates, line: Results) -> float:
        """Return the seconds of a step."""
        compute = float(line["step"] + line["image"] * self.batch * self.models / count)
        if count == 1:
            return compute
        return compute + _cost(self.set, self._algorithm(way, count), count).exposed(rates, compute)

    def _algorithm(self, way: str, count: int) -> Algorithm:
        """Return the algorithm. With fewer processes than P it is synchronous SGD, as in the source."""
        if way == "synchronous" or count < self.models:
            return AllReduce()
        return LocalSGD(self.interval, count // self.models, "allreduce" if way == "allreduce" else "sharded")


@cache  # the cost does not depend on the rates
def _cost(set: str, algorithm: Algorithm, count: int) -> Cost:
    """Return the cost of a step of `count` processes."""
    shapes = SETS[set]()
    return cost_of(algorithm, range(count), [name for name, _ in shapes], [4 * math.prod(shape) for _, shape in shapes])


def computing(set: str, batches: list[int], rounds: int) -> Results:
    """Time forward and backward on one core; return seconds per step and per image, from a line through the medians."""
    network, scale = NETWORKS[set]()
    medians = []
    for batch in batches:
        inputs = torch.randn(batch, *_INPUTS[set])
        seconds = []
        for _ in range(rounds + 1):
            begin = time.perf_counter()
            network(inputs).square().mean().backward()
            seconds.append(time.perf_counter() - begin)
        medians.append(scale * float(np.median(seconds[1:])))
    image, step = np.polyfit(batches, medians, 1)
    return {"step": max(float(step), 0.0), "image": float(image)}


def slower(rates: Rates, factor: float) -> Rates:
    """Return rates with which all communication takes `factor` times as long."""
    inside, across = (line and Line(factor * line.alpha, factor * line.beta) for line in (rates.inside, rates.across))
    return Rates(inside, across, factor * rates.agreement, factor * rates.hop, factor * rates.handling)


def gain(speedups: dict[str, list[float]], way: str, count: int) -> float:
    """Return the factor by which the speedup grows when the processes double to `count`."""
    return speedups[way][COUNTS.index(count)] / speedups[way][COUNTS.index(count // 2)]


def predicted(what: str, value: float, limit: float, above: bool = True) -> Evidence:
    """Judge whether a predicted value is above or below a limit by more than the error of predictions."""
    away = value / limit - 1 if above else 1 - value / limit
    return Evidence(what, None, value, None, 1, OPEN if abs(away) <= _OFF else HOLDS if away > 0 else FAILS)


def judge(scaling: Scaling, speedups: dict[str, list[float]]) -> list[Evidence]:
    """Judge local SGD, with communication slowed down as `like_the_source` finds."""
    at = {way: dict(zip(COUNTS, values, strict=True)) for way, values in speedups.items()}
    most, near = COUNTS[-1], scaling.linear
    shards, whole, synchronous = (at[way] for way in ("sharded", "allreduce", "synchronous"))
    return [
        predicted(f"{most} processes: shards over synchronous SGD, throughput", shards[most] / synchronous[most], 1.0),
        predicted(f"{most} processes: shards over whole models, throughput", shards[most] / whole[most], 1.0),
        predicted(f"{near} processes: speedup of shards over their number; at least 0.8", shards[near] / near, 0.8),
    ]


def draw(shapes: Results, figure: Any) -> None:
    """Draw speedup against the number of processes."""
    axes = figure.subplots()
    for way, values in shapes["speedups"].items():
        axes.plot(COUNTS, values, marker="o", label=NAMES[way])
    axes.plot(COUNTS, COUNTS, "--", color="#888888", label="linear")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(COUNTS, [str(count) for count in COUNTS])
    axes.set(xlabel="processes", ylabel="speedup, predicted")
    axes.legend(frameon=False)


class ResNet20(nn.Module):
    """ResNet-20 for images of 32 x 32 (He et al. 2015, section 4.2), with identity shortcuts."""

    def __init__(self) -> None:
        super().__init__()
        self.head = _conv_and_norm(3, 16, 1)
        widths = [16] * 4 + [32] * 3 + [64] * 3
        self.blocks = nn.ModuleList(
            nn.Sequential(_conv_and_norm(into, out, out // into), nn.ReLU(), _conv_and_norm(out, out, 1))
            for into, out in itertools.pairwise(widths)
        )
        self.tail = nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the outputs of the last layer."""
        values = torch.relu(self.head(images))
        for block in self.blocks:
            added = block(values)
            if added.shape != values.shape:
                missing = added.shape[1] - values.shape[1]
                values = nn.functional.pad(values[:, :, ::2, ::2], (0, 0, 0, 0, 0, missing))
            values = torch.relu(values + added)
        found: torch.Tensor = self.tail(values.mean((2, 3)))
        return found


def _conv_and_norm(into: int, out: int, stride: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(into, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out))


def _edsr_block() -> tuple[nn.Module, float]:
    """Return a residual block of EDSR, and the number of such blocks that have as many weights as EDSR."""
    block = nn.Sequential(nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.Conv2d(256, 256, 3, padding=1))
    whole = sum(math.prod(shape) for _, shape in SETS["edsr"]())
    return block, whole / sum(parameter.numel() for parameter in block.parameters())


NETWORKS = {"resnet20": lambda: (ResNet20(), 1.0), "edsr": _edsr_block}
_INPUTS = {"resnet20": (3, 32, 32), "edsr": (256, 48, 48)}
