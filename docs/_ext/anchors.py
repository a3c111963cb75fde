"""Make plain HTML anchors, `<a id="name"></a>`, targets of links: GitHub has no other way to name a place in a page."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

_ANCHOR = re.compile(r'<a id="([\w.-]+)">')


class Anchors(SphinxTransform):
    """Register a page's anchors with MyST, which otherwise resolves links to headings only."""

    default_priority = 100

    def apply(self, **_: Any) -> None:
        slugs = getattr(self.document, "myst_slugs", {})
        for raw in list(self.document.findall(nodes.raw)):
            found = _ANCHOR.fullmatch(raw.astext().strip())
            if found:
                slugs[found[1]] = (raw.line or 0, found[1], "")
        if slugs:
            self.env.metadata[self.env.docname]["myst_slugs"] = slugs


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the transform."""
    app.add_transform(Anchors)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
