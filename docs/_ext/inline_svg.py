"""Drawings by matplotlib as SVG within a page. Their ink has the colour of the surrounding text, light or dark."""

from __future__ import annotations

import html
import io
import re
from typing import Any

import matplotlib
from docutils import nodes
from matplotlib import pyplot

matplotlib.use("svg")

INK = "#010203"
"""Placeholder of the colour of the page's text."""
FAINT = "#808080"
# Colours of Okabe and Ito that are visible on white and on black, also with red-green colour blindness.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")

_FITTED = r' style="max-width: 100%; height: auto; width: \1pt"'
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.titlesize": 9,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "legend.frameon": False,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
}


def style(name: str) -> Any:
    """Return a context in which to make a figure. `name` makes the identifiers of a drawing unique on a page."""
    return matplotlib.rc_context({**_STYLE, "svg.hashsalt": name})


def picture(figure: Any, name: str, description: str) -> nodes.raw:
    """Return a figure as a node. Call it within `style`.

    Args:
        figure: a figure of matplotlib; its SVG is the same each time.
        name: of the drawing.
        description: text for screen readers.
    """
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None}, bbox_inches="tight")
    pyplot.close(figure)
    svg = file.getvalue()[file.getvalue().index("<svg") :].replace(INK, "currentColor")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' width="([\d.]+)pt" height="[\d.]+pt"', _FITTED, svg, count=1)
    label = html.escape(description, quote=True)
    # Axes and ticks have the same names in every drawing.
    svg = re.sub(r'<g id="(?:figure|axes|patch|text|line2d|matplotlib\.axis|xtick|ytick|legend)_?\d*">', "<g>", svg)
    return nodes.raw("", svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1), format="html")
