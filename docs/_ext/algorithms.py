"""What a page of an algorithm has of the code: idea and facts, two drawings, what it costs, its options.

```{algorithm} crossover          idea, drawings, facts, cost and options; `:drawn:` are settings for the drawings
```{algorithms}                   all that are registered, a row each
"""

from __future__ import annotations

import ast
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from _ext import choosing
from _ext.drawing import drawing
from _ext.markdown import parsed
from _ext.timeline import timeline
from _ext.told import settings, shipped, told
from sordino.algorithms import Algorithm, class_of
from sordino.plan.costs import cost_of
from sordino.report.tables import table

_APART = 8  # workers, each on a node of its own
_CLUSTERS = (
    ("one node of 4", [0] * 4),
    ("2 nodes of 4", [0] * 4 + [1] * 4),
    (f"{_APART} nodes of 1", list(range(_APART))),
)


class Idea(SphinxDirective):
    """What an algorithm does: its docstring, who sends to whom, and when."""

    required_arguments = 1
    option_spec: ClassVar[dict[str, Any]] = {
        "drawn": directives.unchanged,
        "timed": directives.unchanged,
        "steps": directives.nonnegative_int,
    }

    def run(self) -> list[nodes.Node]:
        kind = class_of(self.arguments[0])
        said = told(kind)
        found = parsed(self, "\n\n".join(said.idea))
        drawn = kind(**_settings(self.options.get("drawn", "")))
        if drawn.traits.synchronous:  # of others who meets whom is chance; the traffic has the mean
            found += [drawing(drawn), *parsed(self, _DRAWING.format(drawn=drawn.written()))]
        timed = [kind(**_settings(one)) for one in self.options.get("timed", "").split(";")]
        for one in timed:
            found.append(timeline(one, self.options.get("steps", 6)))
            if len(timed) > 1:
                found += parsed(self, f"*`{one.written()}`*")
        found += parsed(self, _TIMELINE.format(drawn=" or ".join(f"`{one.written()}`" for one in timed)))
        facts = [[f"**{what}**", text] for what, text in said.facts.items()]
        return [*found, *parsed(self, table([" ", " "], facts, texts=2))]


class Costs(SphinxDirective):
    """What an algorithm sends on some clusters."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        return parsed(self, costs(class_of(self.arguments[0])))


class Options(SphinxDirective):
    """What an algorithm's settings are."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        return parsed(self, options(self.arguments[0], class_of(self.arguments[0])))


_DRAWING = (
    "*Who sends to whom under `{drawn}`, among eight workers on two nodes: an arrow sends, a colour a segment; thick "
    "lines join those that average together.*"
)
_TIMELINE = (
    "*In time, by `sordino simulate`: four workers under {drawn}, the last with a third of the others' bandwidth; in "
    "an arrival, whose model it is.*"
)


def _settings(text: str) -> dict[str, Any]:
    """Return the settings that "name=value, name=value" says."""
    call = ast.parse(f"f({text})", mode="eval").body
    assert isinstance(call, ast.Call)
    return {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}


def options(name: str, kind: type[Algorithm]) -> str:
    """Return the options of an algorithm, and of those that have options of their own, as Markdown."""
    blocks = [f'`DistributedOptimizer(..., algorithm="{name}")` has the defaults, `{kind.__name__}(...)` any others:']
    for one in (kind, *kind.parts.values()):
        if one is not kind:
            blocks.append(f"`{one.__name__}` has:")
        rows = [[f"`{option}`", default, meaning.replace("|", r"\|")] for option, default, meaning in settings(one)]
        blocks.append(table(["Option", "Default", "Meaning"], rows, texts=3))
    return "\n\n".join(blocks)


def costs(kind: type[Algorithm]) -> str:
    """Return what a step sends on some clusters, of the bytes of a model of ResNet-50's shapes, as Markdown."""
    tensors, sizes = choosing.MODEL
    rows = []
    for cluster, where in _CLUSTERS:
        for algorithm in kind.candidates(where, choosing.INTERVAL) or [kind()]:
            cost = cost_of(algorithm, where, tensors, sizes)
            sent = sum(cost.sent()) / len(where)
            link = sum(phase.load.link / phase.every for phase in cost.phases)
            memory = sum(max(phase.load.memory) / phase.every for phase in cost.phases)
            shares = [_share(value, sum(sizes)) for value in (sent, link, memory)]
            rows.append([cluster, f"`{algorithm.written()}`", *shares])
    heads = ["Workers on", "Algorithm", "sent to other nodes", "through a node's link", "read and written in memory"]
    what = (
        "A step, in units of the model's bytes (M): what a worker sends to other nodes, what goes through the link of "
        "the busiest node in one direction, and what a worker reads and writes in the memory of its node for the "
        "average. Counted from the algorithm's own traffic, as `sordino plan` does, for the 161 tensors of a ResNet-50."
    )
    return f"{what}\n\n{table(heads, rows, texts=2)}"


def _share(count: float, whole: float) -> str:
    return "0" if count == 0 else f"{count / whole:.3g} M"


class AlgorithmTable(SphinxDirective):
    """All algorithms that ship: what each does, what it sends, how late that is used."""

    def run(self) -> list[nodes.Node]:
        where = list(range(_APART))
        rows = []
        for name in shipped():
            kind = class_of(name)
            said = told(kind)
            sent = sum(cost_of(kind(), where, *choosing.MODEL).sent()) / len(where)
            share = _share(sent, sum(choosing.MODEL[1]))
            rows.append([f"[`{name}`](algorithms/{name}.md)", said.idea[0], said.facts["Staleness"], share])
        heads = ["Name", "What it does", "Staleness", f"Sent a step, {_APART} nodes"]
        return parsed(self, table(heads, rows, texts=3))


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directives."""
    app.add_directive("algorithm", Idea)
    app.add_directive("algorithm-costs", Costs)
    app.add_directive("algorithm-options", Options)
    app.add_directive("algorithms", AlgorithmTable)
    app.add_directive("choosing", choosing.Choosing)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
