"""Drawing of the operations that an algorithm declares (`Algorithm.traffic`): the messages between workers.

Workers stand in a circle, shaded node by node. An exchange along a topology has an arrow from each sender to each
receiver, with one colour per segment. A set of workers that average together has a ring around it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from docutils import nodes
from matplotlib import pyplot
from matplotlib.patches import Circle, FancyArrowPatch, Polygon

from _ext.inline_svg import COLOURS, FAINT, INK, picture, style
from sordino.algorithms import Algorithm
from sordino.algorithms.traffic import Copies, Exchange, Model, Operation, Phase, Reduction

NODES = (0, 0, 0, 0, 1, 1, 1, 1)
MODEL = Model([f"blocks.{k}.weight" for k in range(3)], [1.0] * 3)
_ROUNDS = 3  # drawn of a phase whose exchanges differ
_SAME = 8  # rounds after which nothing new is expected

Point = tuple[float, float]
Panel = tuple[str, Sequence[Operation]]


def panels(algorithm: Algorithm) -> list[Panel]:
    """Return the panels to draw, with title and operations: one per phase, or one per exchange that differs."""
    found: list[Panel] = []
    for phase in algorithm.traffic(MODEL, NODES).phases:
        if phase.until is not None and phase.since == 0 and phase.until <= 1:
            continue  # once, before the first step
        when = "every step" if phase.every == 1 else f"every {phase.every} steps"
        rounds = _ROUNDS if _differs(phase) else 1
        for round in range(rounds):
            shown = [one for one in phase.at(round) if not isinstance(one, Copies)]
            title = when if rounds == 1 else f"{when}: exchange {round + 1}"
            if shown and found and found[-1][0] == title and rounds == 1:
                found[-1] = (title, [*found[-1][1], *shown])
            elif shown:
                found.append((title, shown))
    return found


def _differs(phase: Phase) -> bool:
    def seen(round: int) -> list[Any]:
        return [one.topology.all_sources(one.round, 0) for one in phase.at(round) if isinstance(one, Exchange)]

    return phase.varies and any(seen(round) != seen(0) for round in range(1, _SAME))


def drawing(algorithm: Algorithm) -> nodes.raw:
    """Return the drawing of an algorithm among eight workers on two nodes."""
    shown = panels(algorithm)
    name = algorithm.written()
    with style(name):
        figure, axes = pyplot.subplots(1, len(shown), figsize=(2.5 * len(shown), 2.7), squeeze=False)
        for (title, operations), plot in zip(shown, axes[0]):
            _panel(plot, title, operations)
        caption = f"Messages under {name} among eight workers on two nodes: "
        return picture(figure, name, caption + "; ".join(_words(title, operations) for title, operations in shown))


def _words(title: str, operations: Sequence[Operation]) -> str:
    """Return a description of a panel for screen readers."""
    parts = []
    for one in operations:
        if isinstance(one, Reduction):
            parts += [f"{', '.join(map(str, members))} average together" for members in one.sets.tolist()]
        elif isinstance(one, Exchange):
            parts += [f"{source} sends to {target}" for source, target, segment in _arrows(one) if segment == 0]
    return f"{title}, {'; '.join(dict.fromkeys(parts))}"


def _arrows(one: Exchange) -> list[tuple[int, int, int]]:
    """Return sender, receiver and segment of each message of an exchange."""
    return [
        (members[source], members[place], segment)
        for members in one.sets.tolist()
        for segment, size in enumerate(one.segments)
        if size
        for place in range(len(members))
        for source in one.topology.row(one.round, segment, place)[0]
        if source != place
    ]


def _place(worker: int) -> Point:
    angle = math.pi / 2 - 2 * math.pi * (worker + 0.5) / len(NODES)
    return math.cos(angle), math.sin(angle)


def _panel(plot: Any, title: str, operations: Sequence[Operation]) -> None:
    for node in sorted(set(NODES)):
        corners = [_place(worker) for worker in range(len(NODES)) if NODES[worker] == node]
        plot.add_patch(Polygon(corners, facecolor=FAINT, edgecolor=FAINT, alpha=0.18, linewidth=27, joinstyle="round"))
    together = [one for one in operations if isinstance(one, Reduction)]
    for one in together:
        for number, members in enumerate(one.sets.tolist()):
            _ring(plot, members, COLOURS[number % len(COLOURS)])
    arrows = dict.fromkeys(arrow for one in operations if isinstance(one, Exchange) for arrow in _arrows(one))
    for source, target, segment in arrows:
        bend = 0.12 + 0.1 * (segment % 3)
        plot.add_patch(
            FancyArrowPatch(
                _place(source),
                _place(target),
                arrowstyle="-|>",
                mutation_scale=8,
                shrinkA=9,
                shrinkB=9,
                connectionstyle=f"arc3,rad={bend}",
                color=COLOURS[segment % len(COLOURS)],
                linewidth=1.1,
            )
        )
    for worker in range(len(NODES)):
        plot.add_patch(Circle(_place(worker), 0.15, facecolor="none", edgecolor=INK, linewidth=1))
        plot.text(*_place(worker), str(worker), ha="center", va="center")
    plot.set(xlim=(-1.45, 1.45), ylim=(-1.45, 1.45), aspect="equal", title=title)
    plot.axis("off")


def _ring(plot: Any, members: Sequence[int], colour: str) -> None:
    """Draw a ring: lines between neighbors, and from the last member to the first. These members average together."""
    if len(members) < 2:
        return
    pairs = list(zip(members, [*members[1:], members[0]]))
    for one, other in pairs if len(members) > 2 else pairs[:1]:
        (x, y), (u, v) = _place(one), _place(other)
        plot.plot([x, u], [y, v], color=colour, linewidth=5, alpha=0.55, solid_capstyle="round")
