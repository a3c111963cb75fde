"""Targets with their verdicts, and the beginning of every report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sordino.report import Results
from sordino.report.machines import describe_machine
from sordino.report.tables import table


def ratio(row: Results, over: str, under: str) -> float | None:
    """Return the time of `over` divided by the time of `under`; None if one was not measured."""
    entries = row["contestants"]
    if over not in entries or under not in entries:
        return None
    return float(entries[over]["median"] / entries[under]["median"])


def target(what: str, value: float | None, limit: float, at_least: bool) -> Results:
    """Return a requirement and the measured value. `value` is None if a contestant was not measured."""
    met = None if value is None else bool(value >= limit if at_least else value <= limit)
    return {"what": what, "value": value, "limit": limit, "at_least": at_least, "met": met}


def target_table(targets: Iterable[Results], unit: str = "×") -> str:
    """Return a table of all targets with their verdicts."""
    verdicts = {True: "met", False: "**missed**", None: "not measured"}
    rows = []
    for one in targets:
        sign = "≥" if one["at_least"] else "≤"
        value = "–" if one["value"] is None else f"{one['value']:.3g}{unit}"
        rows.append([one["what"], f"{sign} {one['limit']:g}{unit}", value, verdicts[one["met"]]])
    return table(["Target", "Required", "Measured", "Verdict"], rows)


def opening(results: Results, title: str, what: str) -> list[str]:
    """Return the beginning of every report: title, subject, machine and baselines."""
    notes = "; ".join(f"{name} {note}" for name, note in results.get("baselines", {}).items())
    blocks = [f"# {title}", what, f"Machine: {describe_machine(results['machine'])}"]
    return [*blocks, f"Baselines: {notes}."] if notes else blocks


def head(
    results: Results, title: str, what: str, unit: str = "×", labels: Mapping[str, str] | None = None
) -> list[str]:
    """Return the result of `opening`, then wrong results (by these labels, if any), then the targets."""
    wrong = ", ".join((labels or {}).get(name, name) for name in results.get("wrong", []))
    blocks = opening(results, title, what) + ([f"**Wrong results: {wrong}.**"] if wrong else [])
    return [*blocks, "## Targets", target_table(results["targets"], unit)] if "targets" in results else blocks
