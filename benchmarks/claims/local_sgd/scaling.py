"""Epoch time and speedup by the number of processes: computing measured on a core here, communication predicted."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from claims.claim import Run
from claims.evidence import Evidence, exact
from claims.local_sgd.timed import NAMES
from claims.local_sgd.worker import SETS
from sordino.algorithms import Algorithm, AllReduce, LocalSGD
from sordino.plan import Rates, cost_of
from sordino.report import Results

COUNTS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Scaling:
    """Strong scaling of one training.

    Attributes:
        set: of parameters.
        models: P.
        interval: I.
        batch: B of a local model; synchronous SGD takes P times that.
        linear: processes up to which the source's local SGD is almost linear.
    """

    set: str
    models: int
    interval: int
    batch: int
    linear: int

    def ask(self, quick: bool) -> Generator[Sequence[Run], list[Results], list[Results]]:
        """Ask what computing takes."""
        settings = {"set": self.set, "batches": [1, 2] if quick else [1, 4, 16], "rounds": 2 if quick else 5}
        return (yield [Run("claims.local_sgd.scaling:computing", settings, alone=True)])

    def speedups(self, rates: Rates, line: Results) -> dict[str, list[float]]:
        """Return throughput over one process's, for all COUNTS, by the way of training."""
        shapes = SETS[self.set]()
        names, sizes = [name for name, _ in shapes], [4 * math.prod(shape) for _, shape in shapes]
        total = self.batch * self.models
        found = {}
        for way in NAMES:
            seconds = []
            for count in COUNTS:
                compute = line["step"] + line["image"] * total / count
                algorithm = self._algorithm(way, count)
                waits = 0.0 if count == 1 else cost_of(algorithm, range(count), names, sizes).exposed(rates, compute)
                seconds.append(compute + waits)
            found[way] = [seconds[0] / one for one in seconds]
        return found

    def _algorithm(self, way: str, count: int) -> Algorithm:
        """Return what trains; synchronous SGD while there are fewer processes than P, as in the source."""
        if way == "synchronous" or count < self.models:
            return AllReduce()
        return LocalSGD(self.interval, count // self.models, "allreduce" if way == "allreduce" else "sharded")


def computing(set: str, batches: list[int], rounds: int) -> Results:
    """Time forward and backward on one core; the seconds of a step and of an image, by a line through the medians."""
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


def judge(scaling: Scaling, speedups: dict[str, list[float]]) -> list[Evidence]:
    """Judge who scales how far."""
    at = {way: dict(zip(COUNTS, values, strict=True)) for way, values in speedups.items()}
    most = COUNTS[-1]
    shards, whole, synchronous = (at[way] for way in ("sharded", "allreduce", "synchronous"))
    last = synchronous[most] / synchronous[most // 2]
    near = shards[scaling.linear] / scaling.linear
    over_all, over_whole = shards[most] / synchronous[most], shards[most] / whole[most]
    return [
        exact(f"{most} processes: shards over synchronous SGD, throughput", over_all, over_all > 1),
        exact(f"{most} processes: shards over whole models, throughput", over_whole, over_whole > 1),
        exact(f"synchronous SGD from {most // 2} to {most} processes, speedup; less than 1.5", last, last < 1.5),
        exact(f"{scaling.linear} processes: speedup of shards over their number; at least 0.8", near, near >= 0.8),
    ]


def draw(shapes: Results, figure: Any) -> None:
    """Speedup against processes."""
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
        """Return what the last layer says."""
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
    """Return one residual block of EDSR, and of how many the whole takes the time: convolutions go by their weights."""
    block = nn.Sequential(nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.Conv2d(256, 256, 3, padding=1))
    whole = sum(math.prod(shape) for _, shape in SETS["edsr"]())
    return block, whole / sum(parameter.numel() for parameter in block.parameters())


NETWORKS = {"resnet20": lambda: (ResNet20(), 1.0), "edsr": _edsr_block}
_INPUTS = {"resnet20": (3, 32, 32), "edsr": (256, 48, 48)}
