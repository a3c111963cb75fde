"""Plots of collectives: the time by size for each operation."""

from __future__ import annotations

from typing import Any

from sordino.report import Results
from sordino.report.tables import format_bytes

_COLOURS = {
    "ordinary": "#5fb49c",
    "arena": "#0b6e4f",
    "asynchronous": "#a3d9c3",
    "distributed": "#1b9aaa",
    "over_mpi": "#0b6e4f",
    "openmpi": "#c8553d",
    "mpich": "#e0a458",
    "intelmpi": "#3d5a80",
    "gloo": "#9a6fb0",
    "horovod": "#b5838d",
    "alone": "#555555",
    "floor": "#888888",
}


def draw(results: Results, figure: Any) -> None:
    """Draw a panel per operation, with the quartiles of jobs as bands; bars for operations without sizes."""
    operations = list(dict.fromkeys(row["operation"] for row in results["rows"]))
    columns = min(3, len(operations))
    panels = figure.subplots(-(-len(operations) // columns), columns, squeeze=False).flat
    for axes, operation in zip(panels, operations):
        rows = [row for row in results["rows"] if row["operation"] == operation]
        for name, label in results["labels"].items():
            found = [row for row in rows if name in row["contestants"]]
            if not found:
                continue
            low, middle, high = (
                [row["contestants"][name][part] * 1e6 for row in found] for part in ("q1", "median", "q3")
            )
            if operation == "barrier":
                axes.barh([label], middle, color=_COLOURS[name])
                continue
            sizes = [row["bytes"] for row in found]
            style = "--" if name in ("alone", "floor") else "-"
            axes.plot(sizes, middle, style, marker="o", ms=2, lw=1, color=_COLOURS[name], label=label)
            axes.fill_between(sizes, low, high, color=_COLOURS[name], alpha=0.2)
        axes.set_title(f"{operation}, {results['ranks']} ranks: µs", fontsize=8)
        axes.set_xscale("log")
        if operation != "barrier":
            ticks = [row["bytes"] for row in rows]
            axes.set_xticks(ticks, [format_bytes(size) for size in ticks], rotation=45)
            axes.set_yscale("log")
        axes.minorticks_off()
        axes.tick_params(labelsize=5)
        axes.grid(alpha=0.3)
    for axes in panels:
        axes.set_axis_off()
    handles, labels = next((axes.get_legend_handles_labels() for axes in figure.axes), ([], []))
    if handles:
        figure.legend(handles, labels, fontsize=6, loc="outside lower center", ncols=5)
