"""Plots of a simulation. matplotlib is imported only when a plot is drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sordino import checkpoint
from sordino.report import Results
from sordino.simulate.record import Activity, Span

_COLOURS = ("#888888", "#c8553d", "#0b6e4f", "#3d5a80", "#e0a458")
_ACTIVITIES: dict[Activity, tuple[str, str]] = {
    "compute": ("computes", "#3d5a80"),
    "wait": ("waits", "#e0a458"),
    "transfer": ("receives a model", "#0b6e4f"),
}
_SHOWN = 16  # largest number of workers that are shown, from worker 0 on


def save(path: Path, draw: Callable[[Any], None]) -> None:
    """Draw a figure into a file, in the format of the file's suffix. An error leaves no incomplete file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(11, 5), dpi=120, layout="constrained")
    try:
        draw(figure)
        with checkpoint.atomic_file(path) as file:
            figure.savefig(file, format=path.suffix[1:])
    finally:
        pyplot.close(figure)


def curves(results: Results, figure: Any) -> None:
    """Draw accuracy, or the distance from the optimum, over virtual time, by mode, with thin lines by seed."""
    axes = figure.subplots()
    modes = list(dict.fromkeys(run["mode"] for run in results["runs"]))
    what = "accuracy" if "accuracy" in results["runs"][0]["curve"][0] else "distance"
    for number, mode in enumerate(modes):
        colour = _COLOURS[number % len(_COLOURS)]
        lines = [run["curve"] for run in results["runs"] if run["mode"] == mode]
        if len(lines) > 1:
            for line in lines:
                axes.plot(_column(line, "time"), _column(line, what), color=colour, lw=0.5, alpha=0.5)
        points = min(len(line) for line in lines)
        times, values = (
            [sum(line[point][name] for line in lines) / len(lines) for point in range(points)]
            for name in ("time", what)
        )
        axes.plot(times, values, color=colour, label=mode)
    scale = "linear" if what == "accuracy" else "log"
    axes.set(xlabel="virtual seconds", ylabel=f"{what}, mean over workers", yscale=scale)
    axes.set_title(f"{results['setting']['workers']} workers, {results['setting']['data']}")
    axes.grid(alpha=0.3)
    axes.legend()


def _column(line: Sequence[Mapping[str, float]], name: str) -> list[float]:
    return [point[name] for point in line]


def gantt(spans: Mapping[str, Sequence[Span]], until: float, figure: Any) -> None:
    """Draw when each worker computes, waits and receives a model (and its sender), up to `until` virtual seconds."""
    panels = figure.subplots(len(spans), 1, sharex=True, squeeze=False)[:, 0]
    figure.set_size_inches(11, 1.2 + 2.2 * len(spans))
    for axes, (mode, all_spans) in zip(panels, spans.items(), strict=True):
        found = [span for span in all_spans if span.worker < _SHOWN]
        for activity, (label, colour) in _ACTIVITIES.items():
            of_it = [span for span in found if span.activity == activity]
            low, height = (-0.45, 0.35) if activity == "transfer" else (-0.05, 0.45)
            axes.barh(
                [span.worker + low for span in of_it],
                [1e3 * (span.end - span.begin) for span in of_it],
                height,
                left=[1e3 * span.begin for span in of_it],
                align="edge",
                color=colour,
                edgecolor="white",
                linewidth=0.3,
                label=label,
            )
            if activity == "transfer":
                for span in of_it:
                    middle = 1e3 * (span.begin + min(span.end, until)) / 2
                    axes.text(middle, span.worker - 0.27, str(span.peer), color="white", fontsize=5, ha="center",
                              va="center", clip_on=True)  # fmt: skip
        axes.set_yticks(sorted({span.worker for span in found}))
        axes.set(title=mode, ylabel="worker", xlim=(0, 1e3 * until))
        axes.invert_yaxis()
    panels[-1].set_xlabel("virtual ms")
    panels[0].legend(loc="upper right", fontsize=7, ncols=3)
