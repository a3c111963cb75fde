"""Table and plot of the time that a process takes to join a running job."""

from __future__ import annotations

from typing import Any

from sordino.report import Results, verdicts
from sordino.report.records import Report
from sordino.report.tables import format_quartiles, table

_LABELS = {"respawn": "one process joins (`--respawn`)", "restart": "all ranks restart (`--restarts`)"}


def markdown(results: Results) -> str:
    """Return the times as Markdown."""
    kinds = results["kinds"]
    rows = [
        [label, format_quartiles(kinds[kind]["from_kill"]), format_quartiles(kinds[kind]["from_import"])]
        for kind, label in _LABELS.items()
    ]
    joined = kinds["respawn"]
    what = (
        f"Two ranks with {results['parameters']:,} parameters, SGD with momentum; one is killed. {results['jobs']} "
        f"jobs of each kind. The other rank's steps take {format_quartiles(joined['step'])}, and the slowest one "
        f"around the joining {format_quartiles(joined['slowest_step'])}."
    )
    columns = ["replacement", "from the kill to its first step", "from its import of torch to its first step"]
    return "\n\n".join([*verdicts.head(results, "Joining", what, unit=" s"), table(columns, rows)])


def draw(results: Results, figure: Any) -> None:
    """Draw the times from the kill as bars."""
    axes = figure.subplots()
    axes.barh(list(_LABELS.values()), [results["kinds"][kind]["from_kill"]["median"] for kind in _LABELS])
    axes.set(xlabel="s", title="From the kill of a rank to the first step of its replacement")


REPORTS = {"joining": Report(markdown, draw)}
