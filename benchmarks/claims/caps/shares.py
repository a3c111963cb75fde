"""Figures 2 and 7(a): shares of unchanged parameters by layer."""

from __future__ import annotations

import statistics
from collections.abc import Generator, Sequence
from typing import Any

from claims.caps.training import FULL, QUICK, Training
from claims.claim import Claim, Found, Plan, Run
from claims.evidence import Evidence, above, below, differences
from claims.papers import CAPS
from sordino.report import Results

DIGITS = (None, 4, 3)
EPOCHS, SEEDS = 25, 5
NEVER = 101.0  # percent, so that nothing is skipped
COLOURS = ("#3d5a80", "#0b6e4f", "#e0a458", "#c8553d", "#8d6a9f", "#888888")

_OPTIMIZERS = {"momentum": "SGD with momentum", "plain": "SGD without momentum", "adam": "Adam"}

Shares = list[dict[str, list[float]]]
"""For each seed, each layer's unchanged share in percent, epoch by epoch."""


def shares_of(kinds: Sequence[Results], quick: bool) -> Generator[Sequence[Run], list[Results], dict[str, Shares]]:
    """Ask for trainings of these kinds in which nothing is skipped; return the shares by optimizer and digits."""
    epochs, seeds, task = (3, 2, QUICK) if quick else (EPOCHS, SEEDS, FULL)
    keys = [(kind, digits, seed) for kind in kinds for digits in DIGITS for seed in range(1, seeds + 1)]
    found = yield [
        Training(seed, epochs, options={"threshold": NEVER, "digits": digits}, **kind, **task).run
        for kind, digits, seed in keys
    ]
    shares: dict[str, Shares] = {}
    for (kind, digits, _), one in zip(keys, found, strict=True):
        compared = "bit for bit" if digits is None else f"to {digits} digits"
        shares.setdefault(f"{_OPTIMIZERS[kind['optimizer']]}, {compared}", []).append(one["unchanged"])
    return shares


def at(one: dict[str, list[float]], layers: Sequence[str], epoch: int) -> float:
    """Return the mean share of some layers in an epoch."""
    return statistics.fmean(one[name][epoch] for name in layers)


def shapes(shares: dict[str, Shares]) -> Results:
    """Return mean, minimum and maximum over the seeds, for a picture."""
    panels = []
    for title, seeds in shares.items():
        layers = {}
        for name in seeds[0]:
            epochs = list(zip(*(one[name] for one in seeds), strict=True))
            layers[name] = [[statistics.fmean(e) for e in epochs], [min(e) for e in epochs], [max(e) for e in epochs]]
        panels.append({"title": title, "layers": layers})
    return {"panels": panels}


def draw(shapes: Results, figure: Any) -> None:
    """Draw a panel per optimizer and number of digits: shares by epoch, with a band from minimum to maximum."""
    panels = shapes["panels"]
    rows = len(panels) // len(DIGITS)
    figure.set_size_inches(10, 3 * rows)
    grid = figure.subplots(rows, len(DIGITS), sharex=True, sharey=True, squeeze=False)
    for axes, panel in zip(grid.flat, panels, strict=True):
        for place, (mean, least, most) in enumerate(panel["layers"].values()):
            colour = COLOURS[place * (len(COLOURS) - 1) // max(len(panel["layers"]) - 1, 1)]
            epochs = range(1, len(mean) + 1)
            axes.plot(epochs, mean, color=colour, label=f"layer {place + 1}")
            axes.fill_between(epochs, least, most, color=colour, alpha=0.15, linewidth=0)
        axes.set_title(panel["title"], fontsize="medium")
    figure.supxlabel("epoch")
    figure.supylabel("unchanged, %")
    grid[0, 0].legend(frameon=False, fontsize="x-small")
    figure.tight_layout()


# ---- Figure 2: unchanged parameters in AlexNet's layers while training converges ----


def plan_figure_2(quick: bool) -> Plan:
    """Compare convolutions with linear layers, and the first with the last epoch."""
    shares = yield from shares_of([{"optimizer": name} for name in _OPTIMIZERS], quick)
    rises, gaps = [], []
    for where, seeds in shares.items():
        layers = list(seeds[0])  # two convolutions, two linear layers
        convolutions, linear = layers[:2], layers[2:]
        rise = [at(one, layers, -1) - at(one, layers, 0) for one in seeds]
        gap = [at(one, linear, -1) - at(one, convolutions, -1) for one in seeds]
        rises.append(above(f"{where}: last epoch - first, mean of the layers, points", rise))
        gaps.append(above(f"{where}: linear layers - convolutions, last epoch, points", gap))
    return Found([*rises, *gaps], shapes(shares))


FIGURE_2_CLAIM = Claim(
    name="caps-figure-2",
    paper=CAPS,
    place="Figure 2",
    says="As the loss converges, more and more parameters stay unchanged in a step, and more in fully connected layers "
    "than in convolutions.",
    setting="AlexNet on CIFAR-10, about 20 epochs. The source names neither the optimizer nor the comparison of "
    "parameters.",
    here=f"The network with dropout, {EPOCHS} epochs at one learning rate, nothing skipped; {SEEDS} seeds.",
    plan=plan_figure_2,
    why="The figure depends on two things that the source does not state. With SGD the shares do not rise: steps are "
    "in proportion to gradients, which stay large at a constant rate, and more parameters stay unchanged in the first "
    "epoch, when nothing has been learnt yet, than later. With Adam they rise if parameters are compared to four or "
    "three digits: to 23 % of the last layer and 15 % of the first, or to 84 and 81 %. Compared bit for bit, almost "
    "nothing stays unchanged with any optimizer, except where ReLU or dropout blocks the gradient. So the figure shows "
    "rounding: three digits turn 2 % into 80 %. Linear layers keep more than convolutions in all nine cases.",
    draw=draw,
)


# ---- Figure 7(a): unchanged parameters in ResNet-50's first, middle and last layers ----


_FIGURE_7A_KINDS = [{"optimizer": name, "network": "residual", "decays": True} for name in ("momentum", "adam")]
_FIRST, _MIDDLE, _LAST = 11.0, 1.0, 99.0  # the source's shares, in percent


def plan_figure_7a(quick: bool) -> Plan:
    """Compare the first, the middle and the last layers in the last epoch."""
    shares = yield from shares_of(_FIGURE_7A_KINDS, quick)
    evidence: list[Evidence] = []
    for where, seeds in shares.items():
        first, *middle, last = seeds[0]

        def end(*layers: str, seeds: list[dict[str, list[float]]] = seeds) -> list[float]:
            return [at(one, layers, -1) for one in seeds]

        gaps = {one: differences(end(one), end(*middle)) for one in (first, last)}
        evidence += [
            above(f"{where}: last layer - middle layers, points", gaps[last], source=_LAST - _MIDDLE),
            above(f"{where}: last layer, percent, above half", end(last), 50.0, _LAST),
            below(f"{where}: middle layers, percent, below 1", end(*middle), _MIDDLE, _MIDDLE),
            above(f"{where}: first layer - middle layers, points", gaps[first], source=_FIRST - _MIDDLE),
        ]
    return Found(evidence, shapes(shares))


FIGURE_7A_CLAIM = Claim(
    name="caps-figure-7a",
    paper=CAPS,
    place="Figure 7(a)",
    says="At the end 99 % of the last layer's parameters stay unchanged in a step, 11 % of the first layer's, and "
    "under 1 % of the middle layers'.",
    setting="ResNet-50 on CIFAR-10, up to 100 epochs, linear scaling rule, naive detection.",
    here=f"Eleven layers in residual blocks, {EPOCHS} epochs with a warm-up and a learning rate that falls to zero, "
    f"nothing skipped; {SEEDS} seeds.",
    plan=plan_figure_7a,
    why="The source's pattern, an unchanged last layer and moving middle layers, is not found. The learning rate, "
    "which falls to zero, decides. Compared to four or three digits, 91 to 100 % of every layer are unchanged in the "
    "last epoch; half way through it was 1 to 10 % with SGD and four digits. Compared bit for bit, almost nothing is "
    "unchanged, though most in the last layer, so only the order is the source's: 3 % there and under 1 % in the "
    "middle. No comparison gives 99 % in one layer and 1 % in the others.",
    draw=draw,
)
