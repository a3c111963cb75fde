"""The directive `drawings`, which shows on the page of an algorithm which worker sends to which other, and when.

```{drawings} crossover          `:drawn:` and `:timed:` are settings, `:steps:` those of the second drawing
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
        if drawn.traits.synchronous:  # others draw peers at random, and the traffic has only the mean
            found += [drawing(drawn), *parsed(self, _DRAWING.format(drawn=drawn.written()))]
        timed = [kind(**_settings(one)) for one in self.options.get("timed", "").split(";")]
        for one in timed:
            found.append(timeline(one, self.options.get("steps", 6)))
            if len(timed) > 1:
                found += parsed(self, f"*`{one.written()}`*")
        return found + parsed(self, _TIMELINE.format(drawn=" or ".join(f"`{one.written()}`" for one in timed)))


_DRAWING = (
    "*Who sends to whom under `{drawn}`, among eight workers on two nodes. An arrow is a message, and its colour says "
    "which segment of the model it carries; thick lines join workers that average together.*"
)
_TIMELINE = (
    "*The same in time, as `sordino simulate` finds it: four workers under {drawn}. The last one's link has a third of "
    "the others' bandwidth. The number in an arrival says whose model it is.*"
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
