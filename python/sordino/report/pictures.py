"""Pictures in files. matplotlib is imported only to draw one."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sordino.report import Results

_LINES = 12  # tensors that one plot shows: the largest ones
_SENT, _THRESHOLD = "#0b6e4f", "#3d5a80"


def draw(picture: Callable[[Results, Any], None], results: Results, path: Path) -> bool:
    """Draw one picture into a PNG file. Return False if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(11, 4.5), dpi=120, layout="constrained")
    picture(results, figure)
    figure.savefig(path, metadata={"Software": None})
    pyplot.close(figure)
    return True


def skipping(results: Results, figure: Any) -> None:
    """Draw, by step, each tensor's unchanged ratio, the threshold, and the fraction that was sent.

    `results` is a result of `CaPSStatistics.as_dict()`.
    """
    points = [point for point in results["points"] if point["steps"]]
    steps = [point["step"] for point in points]
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    if points:
        widest = sorted(range(len(results["tensors"])), key=lambda index: -results["tensors"][index]["bytes"])[:_LINES]
        for index in sorted(widest):
            ratios = [point["ratios"][index] for point in points]  # None before the tensor existed
            percent = [math.nan if ratio is None else 100 * ratio for ratio in ratios]
            left.plot(steps, percent, label=results["tensors"][index]["name"])
        left.legend(fontsize=6)
        sent = [100 * point["bytes_sent"] / max(point["bytes_unskipped"], 1) for point in points]
        right.plot(steps, sent, color=_SENT, label="bytes sent")
        thresholds = [math.nan if point["threshold"] is None else point["threshold"] for point in points]
        right.plot(steps, thresholds, "--", color=_THRESHOLD, label="threshold")
        right.legend(fontsize=7)
    left.set(xlabel="step", ylabel="%", title="Unchanged elements")
    right.set(xlabel="step", ylabel="%", ylim=(0, 105), title="Sent, of all parameters")
