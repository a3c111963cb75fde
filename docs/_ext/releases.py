"""Table of the main figures by release: the required value and the value of each release, from its kept file."""

from __future__ import annotations

import json
from pathlib import Path

from sordino.report.tables import table


def history(now: Path, releases: Path) -> str:
    """Return the requirements and the measured values, with one column per release, as Markdown.

    Args:
        now: benchmarks/results/speed.json.
        releases: a folder of earlier states of that file, each named by its release.
    """
    rows = json.loads(now.read_text())["rows"]
    kept = {path.stem: _values(path) for path in sorted(releases.glob("*.json"), key=_release)}
    lines = []
    for row in rows:
        earlier = [_shown(values.get(row["what"])) for values in kept.values()]
        limit = f"{'≥' if row['at_least'] else '≤'} {row['limit']:g}"
        lines.append([row["what"], limit, *earlier, _shown(row["value"])])
    return table(["", "required", *kept, "now"], lines)


def _values(path: Path) -> dict[str, float | None]:
    return {row["what"]: row["value"] for row in json.loads(path.read_text())["rows"]}


def _release(path: Path) -> tuple[int, ...]:
    return tuple(int(part) for part in path.stem.split("."))


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
