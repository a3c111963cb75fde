"""Figure 7: learning curves by the number of local models."""

from __future__ import annotations

from typing import Any

from claims.claim import Claim, Found, Plan
from claims.local_sgd.paper import PAPER
from claims.local_sgd.settings import resolution
from claims.local_sgd.study import draw_curves, learning, mean_curves
from sordino.report import Results


def plan(quick: bool) -> Plan:
    """Every P for as many epochs, and P = 1 for as many steps as each."""
    study, best = yield from resolution(quick).tuned()
    trained = yield from study.ask(study.counts)
    short = yield from study.ask_short(best)
    shapes = {"losses": mean_curves(study, trained, "losses"), "curves": mean_curves(study, trained, "curve")}
    return Found(learning(study, trained, short), shapes)


def draw(shapes: Results, figure: Any) -> None:
    """Training loss, and accuracy on images held out, against epochs."""
    epochs = "part of the epochs"
    panels = [("training loss", epochs, shapes["losses"]), ("PSNR, dB", epochs, shapes["curves"])]
    draw_curves(panels, figure)


CLAIM = Claim(
    name="local-sgd-figure-7",
    paper=PAPER,
    place="Figure 7",
    says="The training loss and the accuracy of 16 local models are worse at every epoch, those of up to 8 are not.",
    setting="EDSR on DIV2K for 1200 epochs, B = 16, I = 4.",
    here="The trainings of Table II; and P = 1 for as many steps as P local models take, which is as much time.",
    plan=plan,
    why="",
    draw=draw,
)
