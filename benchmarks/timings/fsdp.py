"""Table and plot of steps with FSDP2."""

from __future__ import annotations

from typing import Any

from sordino.report import Results, verdicts
from sordino.report.records import Report
from sordino.report.tables import format_quartiles, table

_LABELS = {
    "plain": "whole on each rank, without communication",
    "gloo": "over Gloo",
    "sordino": "over Sordino",
    "shared": "over Sordino, buffers in shared memory",
}


def markdown(results: Results) -> str:
    """Return the times as Markdown."""
    rows = [
        [label, format_quartiles(entry["step"]), format_quartiles(entry["exposed"]) if "exposed" in entry else "–"]
        for name, label in _LABELS.items()
        if name in results["contestants"]
        for entry in [results["contestants"][name]]
    ]
    what = (
        f"A GPT of {results['parameters']:,} parameters, sharded over {results['ranks']} ranks by `fully_shard`. "
        "Exposed communication is the time that a step takes longer than without communication."
    )
    blocks = verdicts.head(results, "FSDP2", what)
    return "\n\n".join([*blocks, table(["contestant", "step", "exposed communication"], rows)])


def draw(results: Results, figure: Any) -> None:
    """Draw the duration of a step as bars."""
    axes = figure.subplots()
    names = [name for name in _LABELS if name in results["contestants"]]
    times = [1e3 * results["contestants"][name]["step"]["median"] for name in names]
    axes.barh([_LABELS[name] for name in names], times)
    axes.set(xlabel="ms", title=f"Step of a small GPT, {results['ranks']} ranks")


REPORTS = {"fsdp": Report(markdown, draw)}
