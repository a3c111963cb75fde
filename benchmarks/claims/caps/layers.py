"""What Figures 2 and 7(a) share: each layer's unchanged share, epoch by epoch, with nothing skipped."""

from __future__ import annotations

import statistics
from collections.abc import Generator, Sequence
from typing import Any

from claims.caps.training import FULL, QUICK, Training
from claims.claim import Run
from sordino.report import Results

DIGITS = (None, 4, 3)
EPOCHS, SEEDS = 25, 5
NEVER = 101.0  # percent: nothing is skipped
COLOURS = ("#3d5a80", "#0b6e4f", "#e0a458", "#c8553d", "#8d6a9f", "#888888")

Shares = list[dict[str, list[float]]]
"""For each seed: each layer's shares in percent, epoch by epoch."""


def compared(digits: int | None) -> str:
    """Return how parameters are compared, in words."""
    return "bit for bit" if digits is None else f"to {digits} digits"


def shares_of(
    kinds: Sequence[Results], quick: bool
) -> Generator[Sequence[Run], list[Results], dict[tuple[str, int | None], Shares]]:
    """Ask for trainings of these kinds that skip nothing; the shares by optimizer and digits."""
    epochs, seeds, task = (3, 2, QUICK) if quick else (EPOCHS, SEEDS, FULL)
    keys = [(kind, digits, seed) for kind in kinds for digits in DIGITS for seed in range(1, seeds + 1)]
    found = yield [
        Training(seed, epochs, options={"threshold": NEVER, "digits": digits}, **kind, **task).run
        for kind, digits, seed in keys
    ]
    shares: dict[tuple[str, int | None], Shares] = {}
    for (kind, digits, _), one in zip(keys, found, strict=True):
        shares.setdefault((kind["optimizer"], digits), []).append(one["unchanged"])
    return shares


def at(one: dict[str, list[float]], layers: Sequence[str], epoch: int) -> float:
    """Return the mean of some layers' shares in an epoch."""
    return statistics.fmean(one[name][epoch] for name in layers)


def shapes(shares: dict[tuple[str, int | None], Shares]) -> Results:
    """Return the mean over the seeds, and the least and the most, for a picture."""
    panels = []
    for (optimizer, digits), seeds in shares.items():
        layers = {}
        for name in seeds[0]:
            epochs = list(zip(*(one[name] for one in seeds), strict=True))
            layers[name] = [[statistics.fmean(e) for e in epochs], [min(e) for e in epochs], [max(e) for e in epochs]]
        panels.append({"title": f"{optimizer}, {compared(digits)}", "layers": layers})
    return {"panels": panels}


def draw(shapes: Results, figure: Any) -> None:
    """A panel for each optimizer and way to compare: shares over epochs, all seeds between the borders of a band."""
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
    for axes in grid[-1]:
        axes.set_xlabel("epoch")
    for axes in grid[:, 0]:
        axes.set_ylabel("unchanged, %")
    grid[0, 0].legend(frameon=False, fontsize="x-small")
    figure.tight_layout()
