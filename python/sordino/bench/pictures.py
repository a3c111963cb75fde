"""Plots of the benchmarks."""

from __future__ import annotations

from typing import Any

from sordino.bench.tables import FUSION
from sordino.report import Results
from sordino.report.tables import format_bytes

_COLOURS = {
    "sordino": "#0b6e4f",
    "waits in step": "#5fb49c",
    "plain": "#888888",
    "gloo": "#e0a458",
    "backend": "#1b9aaa",
    "buckets": "#7a5c99",
    "horovod": "#3d5a80",
}


def fusion(results: Results, figure: Any) -> None:
    """Draw the time that each contestant adds to a step."""
    axes = figure.subplots()
    modes = list(results["modes"].values())
    names = [name for name in FUSION if name != "plain" and any(name in mode["contestants"] for mode in modes)]
    width = 0.8 / max(len(names), 1)
    for number, name in enumerate(names):
        labelled = False
        for place, mode in enumerate(modes):
            if name not in mode["contestants"]:
                continue
            low, middle, high = (mode["contestants"][name]["exposed"][part] * 1e3 for part in ("q1", "median", "q3"))
            bar = axes.bar(
                place + number * width,
                middle,
                width * 0.9,
                yerr=[[max(middle - low, 0)], [max(high - middle, 0)]],
                color=_COLOURS[name],
                label=None if labelled else FUSION[name],
            )
            axes.bar_label(bar, fmt="%.1f", fontsize=8)
            labelled = True
    centre = width * (len(names) - 1) / 2
    axes.set_xticks([place + centre for place in range(len(modes))], [f"set_to_none={key}" for key in results["modes"]])
    title = f"{results['parameters'] / 1e6:.1f} M parameters, {results['ranks']} rank(s)"
    axes.set(ylabel="ms added to a step", title=title)
    axes.legend()


def kernels(results: Results, figure: Any) -> None:
    """Draw the ratio of every kernel's time to a copy's, with one panel per size."""
    sizes = list(dict.fromkeys(row["bytes"] for row in results["rows"]))
    panels = figure.subplots(1, len(sizes), squeeze=False)[0]
    kernels = list(dict.fromkeys(row["kernel"] for row in results["rows"]))
    for axes, size in zip(panels, sizes, strict=True):
        rows = [row for row in results["rows"] if row["bytes"] == size]
        for dtype in dict.fromkeys(row["dtype"] for row in rows):
            found = [row for row in rows if row["dtype"] == dtype]
            axes.plot(
                [kernels.index(row["kernel"]) for row in found], [row["ratio"] for row in found], "o", ms=4, label=dtype
            )
        axes.axhline(results["limit"], color="red", lw=0.8)
        axes.set_xticks(range(len(kernels)), kernels, rotation=30, fontsize=8)
        axes.set(title=f"{format_bytes(size)} a tensor", ylabel="time / copy of the same bytes", yscale="log")
        axes.grid(alpha=0.3)
    panels[-1].legend(fontsize=7, ncols=2)
