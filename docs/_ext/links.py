"""Check the links of a page as far as possible without a network: files, their headings, known hosts.

`make docs-links` sends requests to the hosts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt

HOSTS = {"arxiv.org"}
"""Hosts that links may lead to. Each new host may vanish, so it must be added here by hand."""
_EXTERNAL = re.compile(r"https?://([^/]+)")
_ID = re.compile(r'<a id="([\w.-]+)">')


def problems(page: Path, text: str) -> list[str]:
    """Return the problems of the links of a page of Markdown."""
    found = []
    for target in _targets(text):
        external = _EXTERNAL.match(target)
        if external:
            if external[1] not in HOSTS:
                found.append(f"{page.name}: {target} leads to a host that is not in docs/_ext/links.py")
            continue
        file, _, anchor = target.partition("#")
        path = page.parent / file if file else page
        if file and not path.exists():
            found.append(f"{page.name}: {target} is not a file")
        elif anchor and path.suffix == ".md" and anchor not in (_anchors_of(path) if file else anchors(text)):
            found.append(f"{page.name}: {target} is not a heading of {path.name}")
    return found


def anchors(text: str) -> set[str]:
    """Return the anchors of a page that a link can name: its headings, as GitHub writes them, and HTML anchors."""
    tokens = MarkdownIt().parse(text)
    headings = [after.content for token, after in pairwise(tokens) if token.type == "heading_open"]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings} | set(_ID.findall(text))


@cache
def _anchors_of(path: Path) -> set[str]:
    return anchors(path.read_text())


def _targets(text: str) -> Iterator[str]:
    for block in MarkdownIt().enable("table").parse(text):
        for token in block.children or ():
            if token.type == "link_open":
                yield str(token.attrs["href"])
            elif token.type == "image":
                yield str(token.attrs["src"])
