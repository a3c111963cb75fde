"""The site begins with the README; what it has beside it is the table of contents, docs/_contents.md."""

from __future__ import annotations

from pathlib import Path

from sphinx.application import Sphinx

CONTENTS = Path(__file__).resolve().parents[1] / "_contents.md"


def add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Add the table of contents to the first page."""
    if page == app.config.root_doc:
        app.env.note_dependency(str(CONTENTS))
        source[0] += CONTENTS.read_text()


def setup(app: Sphinx) -> dict[str, bool]:
    """Register it."""
    app.connect("source-read", add_contents)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
