"""The results of benchmarks on the site: what prose cites of them is compared, and their main figures by release."""

from __future__ import annotations

from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

from _ext import figures
from _ext.markdown import parsed
from _ext.releases import history

_BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
_LOG = logging.getLogger(__name__)


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
