"""Conversion of Markdown that a directive has generated into nodes."""

from __future__ import annotations

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective


def parsed(directive: SphinxDirective, text: str) -> list[nodes.Node]:
    """Return the nodes of Markdown without headings. Warnings name the place of the directive."""
    holder = nodes.container()
    source = directive.get_source_info()[0]
    directive.state.nested_parse(StringList(text.splitlines(), source), directive.content_offset, holder)
    return list(holder.children)
