"""Figure 7: accuracy of Layered and AllReduce on the same data."""

from __future__ import annotations

import statistics
from typing import Any

from claims.claim import Claim, Found, Plan
from claims.evidence import exact, within
from claims.papers import LAYERED
from claims.training import Training
from sordino.report import Results

WORKERS, GROUP, BATCH, SEEDS, RATE = 32, 4, 1024, 10, 0.1
_FULL: dict[str, Any] = {"data": "fashion-mnist", "images": 12288, "held_out": 5000, "epochs": 30}
_QUICK: dict[str, Any] = {"data": "digits", "images": 1024, "held_out": 256, "epochs": 2}
_MARGIN, _LEARNT = 0.25, 50.0  # points; percent, below which a training has collapsed


def plan(quick: bool) -> Plan:
    """Train with both algorithms from the same parameters on the same mini-batches."""
    task, workers, batch, seeds = (_QUICK, 8, 64, 2) if quick else (_FULL, WORKERS, BATCH, SEEDS)
    ways: dict[str, Results] = {"allreduce": {}, "layered": {"group_size": GROUP}}
    keys = [(name, seed) for name in ways for seed in range(1, seeds + 1)]
    found = yield [Training(name, workers, batch, RATE, seed, options=ways[name], **task).run for name, seed in keys]
    tests = {key: 100 * one["test"] for key, one in zip(keys, found, strict=True)}
    both = [(tests["layered", seed], tests["allreduce", seed]) for seed in range(1, seeds + 1)]
    sound = [(one, other) for one, other in both if min(one, other) > _LEARNT or quick]
    collapsed = len(both) - len(sound)
    apart = statistics.fmean(one["consensus_distance"][-1] or 0.0 for one in found)
    gaps = [one - other for one, other in sound]
    evidence = [
        within(f"Layered - AllReduce, points: within {_MARGIN:g}", gaps, _MARGIN, 72.79 - 73.49, collapsed),
        exact("distance between the workers' models at the end, mean; less than 1e-4", apart, apart < 1e-4),
    ]
    return Found(evidence, {"pairs": both})


def draw(shapes: Results, figure: Any) -> None:
    """Draw Layered's accuracy against AllReduce's, one point per seed."""
    axes = figure.subplots()
    layered, allreduce = zip(*shapes["pairs"], strict=True)
    ends = [min(*layered, *allreduce), max(*layered, *allreduce)]
    axes.plot(ends, ends, "--", color="#888888", label="the same")
    axes.plot(allreduce, layered, "o", color="#3d5a80", label="a seed")
    axes.set(xlabel="AllReduce, test accuracy, %", ylabel="Layered, test accuracy, %")
    axes.legend(frameon=False)


CLAIM = Claim(
    name="layered-figure-7",
    paper=LAYERED,
    place="Figure 7",
    says="Layered is as accurate as AllReduce: it reaches 72.79 %, AllReduce 73.49 %.",
    setting="ResNet-50 on ImageNet, 256 workers, mini-batches of 16,384, learning rate 6.4 after a warm-up, one "
    "training each.",
    here=f"{WORKERS} workers (threads) in groups of {GROUP}, mini-batches of {BATCH} of {_FULL['images']} images, the "
    f"same initial parameters and data, learning rate {RATE:g} after a warm-up; {SEEDS} seeds.",
    plan=plan,
    why="The two are equally accurate, within a quarter of a point, because they compute the same: Layered takes the "
    "same step a little later, and adds in another order. Only chance explains the 0.7 points between the source's two "
    "trainings: here the best and the worst seed are 0.7 points apart too.",
    draw=draw,
)
