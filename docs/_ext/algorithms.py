"""The directive `drawings`: two drawings of an algorithm's messages, by pairs of workers and by time.

```{drawings} crossover          `:drawn:` and `:timed:` are settings, `:steps:` is the length of the second drawing
```
"""

from __future__ import annotations

import ast
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from _ext.drawing import drawing
from _ext.markdown import parsed
from _ext.timeline import timeline
from sordino.algorithms import class_of


class Drawings(SphinxDirective):
    """Drawings of the messages between workers, and of their times."""

    required_arguments = 1
    option_spec: ClassVar[dict[str, Any]] = {
        "drawn": directives.unchanged,
        "timed": directives.unchanged,
        "steps": directives.nonnegative_int,
    }

    def run(self) -> list[nodes.Node]:
        kind = class_of(self.arguments[0])
        found: list[nodes.Node] = []
        drawn = kind(**_settings(self.options.get("drawn", "")))
        if drawn.traits.synchronous:  # other algorithms draw peers at random, and their traffic is only a mean
            found += [drawing(drawn), *parsed(self, _DRAWING.format(drawn=drawn.written()))]
        timed = [kind(**_settings(one)) for one in self.options.get("timed", "").split(";")]
        for one in timed:
            found.append(timeline(one, self.options.get("steps", 6)))
            if len(timed) > 1:
                found += parsed(self, f"*`{one.written()}`*")
        return found + parsed(self, _TIMELINE.format(drawn=" or ".join(f"`{one.written()}`" for one in timed)))


_DRAWING = (
    "*Messages under `{drawn}` among eight workers on two nodes. An arrow is a message, and its colour is that of the "
    "segment of the model that it carries. Thick lines join workers that average together.*"
)
_TIMELINE = (
    "*The same over time, from `sordino simulate`: four workers under {drawn}. The link of the last worker has a third "
    "of the bandwidth of the other links. The number in an arrival is the worker that sent the model.*"
)


def _settings(text: str) -> dict[str, Any]:
    """Return the settings in a text such as "name=value, name=value"."""
    call = ast.parse(f"f({text})", mode="eval").body
    assert isinstance(call, ast.Call)
    return {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("drawings", Drawings)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
