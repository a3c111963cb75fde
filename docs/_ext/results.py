"""Results of benchmarks on the site: compare figures in prose with the cited values, and link the result's page."""

from __future__ import annotations

from pathlib import Path

from sphinx.application import Sphinx
from sphinx.util import logging

from _ext import figures

_LOG = logging.getLogger(__name__)


def check(app: Sphinx, page: str, source: list[str]) -> None:
    """Warn of figures that differ from the cited values, and point their links to the pages of results."""
    path = Path(app.env.doc2path(page))
    for problem in figures.problems(path, source[0]) if ".json#" in source[0] else ():
        _LOG.warning(problem, location=page)
    source[0] = figures.on_the_site(source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the check."""
    app.connect("source-read", check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
