"""Figure 3: learning curves by the number of local models."""

from __future__ import annotations

from typing import Any

from claims.claim import Claim, Found, Plan
from claims.local_sgd.paper import PAPER
from claims.local_sgd.settings import classification
from claims.local_sgd.study import draw_curves, learning, mean_curves
from sordino.report import Results


def plan(quick: bool) -> Plan:
    """Every P for as many epochs, and P = 1 for as many steps as each."""
    study, best = yield from classification(quick).tuned()
    trained = yield from study.ask(study.counts)
    short = yield from study.ask_short(best)
    shapes = {"losses": mean_curves(study, trained, "losses"), "curves": mean_curves(study, trained, "curve")}
    return Found(learning(study, trained, short), shapes)


def draw(shapes: Results, figure: Any) -> None:
    """Training loss, and accuracy on images held out, against epochs."""
    epochs = "part of the epochs"
    panels = [("training loss", epochs, shapes["losses"]), ("accuracy, %", epochs, shapes["curves"])]
    draw_curves(panels, figure)


CLAIM = Claim(
    name="local-sgd-figure-3",
    paper=PAPER,
    place="Figure 3",
    says="The training loss and the accuracy of 8 and more local models are worse at every epoch.",
    setting="ResNet-20 on CIFAR-10 for 200 epochs, B = 128, I = 8.",
    here="The trainings of Table I; and P = 1 for as many steps as P local models take, which is as much time.",
    plan=plan,
    why="At equal epochs the losses lie in the source's order. But P local models take P times fewer steps for as "
    "many epochs, so that order is not what a user with P times the workers sees: after as many steps, which is "
    "as much time, eight models are better than one that has the rate that suits it best, and two and four are "
    "not, because the rate that 32 models bear is too low for them.",
    draw=draw,
)
