"""Table and plot of the cost of a run record."""

from __future__ import annotations

from typing import Any

from sordino.report import Results, verdicts
from sordino.report.records import Report
from sordino.report.tables import format_quartiles, table

LABELS = {"none": "no record", "lines": "a record", "spans": "a record that keeps spans"}


def markdown(results: Results) -> str:
    """Return the times of a step with and without a record as Markdown."""
    what = (
        f"{results['ranks']} ranks, {results['tensors']} tensors, {results['turns']} turns of {results['steps']} steps "
        f"of each. A step's line takes {results['bytes']:.0f} bytes a rank."
    )
    rows = [
        [
            label,
            format_quartiles(results["contestants"][name]),
            "" if name == "none" else format_quartiles(results["writing"][name]),
        ]
        for name, label in LABELS.items()
    ]
    heads = ["", "a step, and quartiles", "of which writing, of rank 0"]
    return "\n\n".join([*verdicts.opening(results, "What a record costs", what), table(heads, rows)])


def draw(results: Results, figure: Any) -> None:
    """Draw the time of writing and of a whole step."""
    axes = figure.subplots()
    bars = {"a step without a record": results["contestants"]["none"]["median"]}
    bars |= {f"writing of {LABELS[name]}": found["median"] for name, found in results["writing"].items()}
    axes.barh(list(bars), [1e6 * seconds for seconds in bars.values()])
    axes.set(xlabel="µs", title="What a record costs a step")


REPORTS = {"record": Report(markdown, draw)}
