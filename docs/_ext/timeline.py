"""Drawing of an algorithm in time, from `sordino simulate`: when workers compute and wait, and when models arrive.

It has four workers in virtual time. The link of the last one has a third of the rate of the other links.
"""

from __future__ import annotations

import numpy as np
from docutils import nodes
from matplotlib import pyplot

from _ext.inline_svg import COLOURS, INK, picture, style
from sordino.algorithms import Algorithm
from sordino.simulate.command import simulate
from sordino.simulate.job import Job
from sordino.simulate.links import Links
from sordino.simulate.record import Span

WORKERS = 4
STEP = 0.1  # seconds
_GBPS = [1.0, 1.0, 1.0, 1 / 3]
_NARROW = 0.01  # share of the width of the drawing; a narrower arrival has no label
_BYTES = 1e7  # 80 ms on a fast link
_ROWS = {
    "compute": ("computes", COLOURS[0]),
    "wait": ("waits", COLOURS[1]),
    "transfer": ("a model arrives", COLOURS[2]),
}


def spans(algorithm: Algorithm, steps: int) -> tuple[list[Span], float]:
    """Return the workers' spans, and the virtual second at which the drawing ends: 1.25 times `steps` without waits."""
    job = Job(
        algorithm,
        WORKERS,
        Links(_GBPS, 0.002),
        np.array([STEP]),
        _BYTES,
        steps=4 * steps,
        data="none",
        spans_until=1.25 * steps * STEP,
    )
    return simulate(job, lambda part: None).record.spans, job.spans_until


def timeline(algorithm: Algorithm, steps: int) -> nodes.raw:
    """Return the drawing."""
    found, until = spans(algorithm, steps)
    name = algorithm.written()
    with style(f"{name}, in time"):
        figure, plot = pyplot.subplots(figsize=(7.4, 2.3))
        for activity, (label, colour) in _ROWS.items():
            shown = [span for span in found if span.activity == activity]
            low, height = (0.02, 0.38) if activity == "transfer" else (-0.4, 0.38)
            plot.barh(
                [span.worker + low for span in shown],
                [min(span.end, until) - span.begin for span in shown],
                height,
                left=[span.begin for span in shown],
                align="edge",
                color=colour,
                edgecolor=INK,
                linewidth=0.4,
                hatch="///" if activity == "wait" else None,
                label=label if shown else None,
            )
            for span in shown if activity == "transfer" else ():
                if span.peer >= 0 and span.end - span.begin > _NARROW * until:
                    middle = (span.begin + min(span.end, until)) / 2
                    plot.text(middle, span.worker + 0.21, f"{span.peer}", fontsize=7, ha="center", va="center")
        plot.set(yticks=range(WORKERS), ylabel="worker", xlim=(0, until), xlabel="virtual seconds")
        plot.set_ylim(WORKERS - 0.5, -0.5)
        plot.spines[["top", "right"]].set_visible(False)
        plot.legend(loc="upper center", bbox_to_anchor=(0.5, 1.2), ncols=3, fontsize=8)
        return picture(figure, f"{name}, in time", _words(name, found))


def _words(name: str, found: list[Span]) -> str:
    seconds = {
        activity: sum(span.end - span.begin for span in found if span.activity == activity) for activity in _ROWS
    }
    totals = ", ".join(f"{label} {seconds[activity]:.2g} s" for activity, (label, _) in _ROWS.items())
    return f"Four workers under {name} in virtual time, the last with a slow link; in total: {totals}"
