"""Warn in `make docs` of links that Markdown did not resolve, such as `[text](where)` or `[text][name]`."""

from __future__ import annotations

import re

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging

_LEFT = re.compile(r"(?<![\w\]])\[[^\[\]]+\](?:\(|\[)\S*")
_CODE = (nodes.literal, nodes.literal_block, nodes.raw, nodes.comment)


def left(tree: nodes.Node) -> list[str]:
    """Return the parts of a page's text that look like links but are not."""
    return [
        found[0]
        for text in tree.findall(nodes.Text)
        if not isinstance(text.parent, _CODE)
        for found in _LEFT.finditer(text.astext())
    ]


def look(app: Sphinx, tree: nodes.document, page: str) -> None:
    """Warn of unresolved links."""
    for found in left(tree):
        logging.getLogger(__name__).warning("%s: a link without a target: %s", page, found)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the callback."""
    app.connect("doctree-resolved", look)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
