"""The results of benchmarks on the site: what prose cites of them is compared, and their main figures by release."""

from __future__ import annotations

import json
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

from _ext import figures
from _ext.markdown import parsed
from sordino.report.tables import table

_BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
_LOG = logging.getLogger(__name__)


def history(now: Path, releases: Path) -> str:
    """Return the requirements and what has been measured of each, a column a release, as Markdown.

    Args:
        now: benchmarks/results/speed.json, which also says what was measured of version 0.1.
        releases: a folder of earlier states of that file, each named by its release.
    """
    rows = json.loads(now.read_text())["rows"]
    kept = {path.stem: _values(path) for path in sorted(releases.glob("*.json"), key=_release)}
    lines = []
    for row in rows:
        earlier = [_shown(values.get(row["what"])) for values in kept.values()]
        limit = f"{'≥' if row['at_least'] else '≤'} {row['limit']:g}"
        lines.append([row["what"], limit, row["before"], *earlier, _shown(row["value"])])
    return table(["", "required", "0.1", *kept, "now"], lines)


def _values(path: Path) -> dict[str, float | None]:
    return {row["what"]: row["value"] for row in json.loads(path.read_text())["rows"]}


def _release(path: Path) -> tuple[int, ...]:
    return tuple(int(part) for part in path.stem.split("."))


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


class History(SphinxDirective):
    """The main figures by release."""

    def run(self) -> list[nodes.Node]:
        now = _BENCHMARKS / "results" / "speed.json"
        self.env.note_dependency(str(now))
        return parsed(self, history(now, _BENCHMARKS / "history"))


def check(app: Sphinx, page: str, source: list[str]) -> None:
    """Warn of figures that are not what they cite, and lead their links to the pages of results."""
    path = Path(app.env.doc2path(page))
    for problem in figures.problems(path, source[0]) if ".json#" in source[0] else ():
        _LOG.warning(problem, location=page)
    source[0] = figures.on_the_site(source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive and the check."""
    app.add_directive("history", History)
    app.connect("source-read", check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
