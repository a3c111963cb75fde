"""Figure 7: learning curves by the number of local models."""

from __future__ import annotations

from functools import partial

from claims.claim import Claim, Plan
from claims.local_sgd.plans import draw_learning, learning_curves
from claims.local_sgd.settings import resolution
from claims.papers import LOCAL_SGD


def plan(quick: bool) -> Plan:
    """Every P for as many epochs, and P = 1 for as many steps as each."""
    return learning_curves(resolution(quick))


CLAIM = Claim(
    name="local-sgd-figure-7",
    paper=LOCAL_SGD,
    place="Figure 7",
    says="The training loss and the accuracy of 16 local models are worse at every epoch, those of up to 8 are not.",
    setting="EDSR on DIV2K for 1200 epochs, B = 16, I = 4.",
    here="The trainings of Table II; and P = 1 for as many steps as P local models take, which is as much time.",
    plan=plan,
    why="At equal epochs sixteen models have the larger loss, as the source shows. At equal steps, which is as much "
    "time, every number of local models is better than one, by 0.2 to 1 decibel, for they have seen P times the "
    "images.",
    draw=partial(draw_learning, "PSNR, dB"),
)
