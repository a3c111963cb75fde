"""Figure 3: learning curves by the number of local models."""

from __future__ import annotations

from functools import partial

from claims.claim import Claim, Plan
from claims.local_sgd.plans import draw_learning, learning_curves
from claims.local_sgd.settings import classification
from claims.papers import LOCAL_SGD


def plan(quick: bool) -> Plan:
    """Every P for as many epochs, and P = 1 for as many steps as each."""
    return learning_curves(classification(quick))


CLAIM = Claim(
    name="local-sgd-figure-3",
    paper=LOCAL_SGD,
    place="Figure 3",
    says="The training loss and the accuracy of 8 and more local models are worse at every epoch.",
    setting="ResNet-20 on CIFAR-10 for 200 epochs, B = 128, I = 8.",
    here="The trainings of Table I; and P = 1 for as many steps as P local models take, which is as much time.",
    plan=plan,
    why="At equal epochs the losses lie in the source's order. But P local models take P times fewer steps for as "
    "many epochs, so that order is not what a user with P times the workers sees, and the rows at equal steps, "
    "which the source does not have, compare as much time. There eight models are better than one that has the "
    "rate that suits it best; two and four are not, because the rate that 32 models bear is too low for them, "
    "sixteen are not told apart, and of 32 those that do not collapse are far behind.",
    draw=partial(draw_learning, "accuracy, %"),
)
