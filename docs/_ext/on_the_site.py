"""What only the site shows (drawings, contents, commands) stands in a page within a comment: other readers skip it.

<!-- on the site:
```{drawings} crossover
```
-->
"""

from __future__ import annotations

import re

from sphinx.application import Sphinx

_HIDDEN = re.compile(r"^<!-- on the site:\n(.*?)^-->$", re.MULTILINE | re.DOTALL)


def uncovered(text: str) -> str:
    """Return a page with what it has for the site, line for line."""
    return _HIDDEN.sub(r"\n\1", text)


def uncover(app: Sphinx, page: str, source: list[str]) -> None:
    """Have Sphinx read what the comments hold."""
    source[0] = uncovered(source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    """Register it."""
    app.connect("source-read", uncover)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
