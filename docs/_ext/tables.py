"""Generated text and tables of the pages of algorithms, as Markdown: idea, facts, options, costs, an overview."""

from __future__ import annotations

from _ext import choosing
from _ext.docstrings import parts_of, settings, shipped
from sordino.algorithms import class_of
from sordino.plan.costs import cost_of
from sordino.report.tables import table

_APART = 8  # workers, each on its own node
_CLUSTERS = (
    ("one node of 4", [0] * 4),
    ("2 nodes of 4", [0] * 4 + [1] * 4),
    (f"{_APART} nodes of 1", list(range(_APART))),
)


def idea(name: str) -> str:
    """Return the description of an algorithm, and a table of its facts."""
    parts = parts_of(class_of(name))
    facts = [[f"**{name}**", text] for name, text in parts.facts.items()]
    return "\n\n".join([*parts.idea, _prose(["Property", "Value"], facts)])


def options(name: str) -> str:
    """Return the options of an algorithm, and of its parts that have their own options."""
    kind = class_of(name)
    blocks = [f'`DistributedOptimizer(..., algorithm="{name}")` uses the defaults. `{kind.__name__}(...)` sets others:']
    for one in (kind, *kind.parts.values()):
        if one is not kind:
            blocks.append(f"Options of `{one.__name__}`:")
        rows = [[f"`{option}`", default, meaning] for option, default, meaning in settings(one)]
        blocks.append(_prose(["Option", "Default", "Meaning"], rows))
    return "\n\n".join(blocks)


def costs(name: str) -> str:
    """Return the bytes that a step sends on some clusters, in units of the bytes of a ResNet-50."""
    kind = class_of(name)
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
    caption = (
        "The costs of a step, in units of the model's bytes (M): the bytes that a worker sends to other nodes; the "
        "bytes through the link of the busiest node, in one direction; and the bytes that a worker reads and writes in "
        "the memory of its node for the average. They are counted from the algorithm's own traffic, as in `sordino "
        "plan`, for the 161 tensors of a ResNet-50."
    )
    return f"{caption}\n\n{table(heads, rows, texts=2)}"


def _share(count: float, whole: float) -> str:
    return "0" if count == 0 else f"{count / whole:.3g} M"


def overview() -> str:
    """Return a table of the shipped algorithms: description, staleness, and bytes sent per step."""
    where = list(range(_APART))
    rows = []
    for name in shipped():
        kind = class_of(name)
        parts = parts_of(kind)
        sent = sum(cost_of(kind(), where, *choosing.MODEL).sent()) / len(where)
        share = _share(sent, sum(choosing.MODEL[1]))
        rows.append([f"[`{name}`](algorithms/{name}.md)", parts.idea[0], parts.facts["Staleness"], share])
    heads = ["Name", "Description", "Staleness", f"Sent per step, {_APART} nodes"]
    return _prose(heads, rows)


def _prose(heads: list[str], rows: list[list[str]]) -> str:
    """Return a table whose cells are sentences, without aligned columns."""
    lines = [heads, ["---"] * len(heads), *[[cell.replace("|", r"\|") for cell in row] for row in rows]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
