"""Parts of pages that only the site shows (drawings, contents, commands). A comment hides them from other readers.

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
    """Return a page with its parts for the site; the number of lines stays the same."""
    return _HIDDEN.sub(r"\n\1", text)


def uncover(app: Sphinx, page: str, source: list[str]) -> None:
    """Pass the contents of the comments to Sphinx."""
    source[0] = uncovered(source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the callback."""
    app.connect("source-read", uncover)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
