"""Make the README the first page of the site: index.html, which a server shows for a folder, is a copy of it."""

from __future__ import annotations

import shutil
from pathlib import Path

from sphinx.application import Sphinx


def begin(app: Sphinx, error: Exception | None) -> None:
    """Copy the first page to the name that a server looks for."""
    if error is None and app.builder.format == "html":
        folder = Path(app.outdir)
        shutil.copyfile(folder / f"{app.config.root_doc}.html", folder / "index.html")


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the callback."""
    app.connect("build-finished", begin)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
