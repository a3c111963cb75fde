"""Text and plot about the training whose ranks are killed and replaced."""

from __future__ import annotations

from typing import Any

from sordino.report import Results, verdicts
from sordino.report.records import Report
from sordino.report.tables import format_quartiles


def markdown(results: Results) -> str:
    """Return the results as Markdown."""
    found = results["disturbed"]
    what = (
        f"{results['epochs']} epochs of {results['data']} on {results['ranks']} ranks of `sordino run --respawn`; each "
        f"takes {results['epoch_seconds']:.1f} s without kills. A random rank is killed each {results['every']:g} s, "
        f"on average; seed {results['seed']}."
    )
    if found["back"] is not None:
        what += (
            f" {found['kills']} kills, {found['replaced']} replacements, which took their first steps "
            f"{format_quartiles(found['back'])} after the kill (median, quartiles). The longest time in which no rank "
            f"took a step was {found['longest_stop']:.2f} s."
        )
    if found["status"] == 0:
        what += f" {found['accuracy']:.2%} of the test images are right at the end, {results['accuracy']:.2%} without."
    return "\n\n".join(verdicts.head(results, "Kills and replacements", what))


def draw(results: Results, figure: Any) -> None:
    """Draw the times of the training with and without kills."""
    axes = figure.subplots()
    seconds = results["epoch_seconds"] * results["epochs"], results["disturbed"]["training_seconds"]
    axes.barh(["without kills", "with kills"], seconds)
    axes.set(xlabel="s", title="Time of the training")


REPORTS = {"soak_joins": Report(markdown, draw)}
