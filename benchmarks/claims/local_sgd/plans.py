"""The plans of the source's two studies, which differ in what is trained: a table, learning curves, distances."""

from __future__ import annotations

from typing import Any

from claims.claim import Found, Plan
from claims.local_sgd.study import (
    Study,
    accuracy,
    distances,
    draw_curves,
    draw_tests,
    learning,
    mean_curves,
    tests,
)
from sordino.report import Results

_EPOCHS = "part of the epochs"


def table(untuned: Study, source: dict[str, float]) -> Plan:
    """Every P at a rate that all bear; and which collapse at the rate that suits one model best."""
    study, best = yield from untuned.tuned()
    trained = yield from study.ask(study.counts)
    collapses = yield from study.collapses(best)
    return Found([*accuracy(study, trained), *collapses], {"tests": tests(study, trained), "source": source})


def learning_curves(untuned: Study) -> Plan:
    """Every P for as many epochs, and P = 1 for as many steps as each."""
    study, best = yield from untuned.tuned()
    trained = yield from study.ask(study.counts)
    short = yield from study.ask_short(best)
    shapes = {"losses": mean_curves(study, trained, "losses"), "curves": mean_curves(study, trained, "curve")}
    return Found(learning(study, trained, short), shapes)


def distance_curves(untuned: Study, source: dict[int, float]) -> Plan:
    """Every P but 1; `source` says what part of a doubling D grows by, by the larger P."""
    study, _ = yield from untuned.tuned()
    trained = yield from study.ask(study.counts[1:])
    return Found(distances(study, trained, source), {"distances": mean_curves(study, trained, "distances")})


def draw_table(label: str, shapes: Results, figure: Any) -> None:
    """Draw accuracy, as the label has it, against P, beside the source's."""
    draw_tests(shapes["tests"], shapes["source"], label, figure)


def draw_learning(label: str, shapes: Results, figure: Any) -> None:
    """Draw training loss, and accuracy on images held out, as the label has it, against epochs."""
    draw_curves([("training loss", _EPOCHS, shapes["losses"]), (label, _EPOCHS, shapes["curves"])], figure)


def draw_distances(shapes: Results, figure: Any) -> None:
    """Draw D against the part of the training that is over."""
    draw_curves([("distance D before averaging", _EPOCHS, shapes["distances"])], figure)
