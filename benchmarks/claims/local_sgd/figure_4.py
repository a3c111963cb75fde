"""Figure 4: the distance between local models and their mean, by their number."""

from __future__ import annotations

from claims.claim import Claim, Plan
from claims.local_sgd.plans import distance_curves, draw_distances
from claims.local_sgd.settings import classification
from claims.papers import LOCAL_SGD

_SOURCE = {4: 1.15, 8: 0.82}  # what part of a doubling D grows by, read off its curves


def plan(quick: bool) -> Plan:
    """Every P but 1."""
    return distance_curves(classification(quick), _SOURCE)


CLAIM = Claim(
    name="local-sgd-figure-4",
    paper=LOCAL_SGD,
    place="Figure 4",
    says="The distance D between local models and their mean grows in proportion to P up to 4, a little less at 8, "
    "and no longer beyond.",
    setting="ResNet-20 on CIFAR-10, B = 128, I = 8, the learning rate times P: D is 0.8 to 0.9 at P = 2, 1.9 to 2.0 "
    "at 4, 3 to 3.4 at 8.",
    here="The trainings of Table I; D before each averaging, the mean after the warm-up.",
    plan=plan,
    why="Here the distance does not flatten: up to 16 it grows in proportion to P, and at 32, where trainings begin "
    "to collapse, faster. Under the linear rule the rate grows with P, and with it how far models go between two "
    "averagings. If their distances were independent noise, D would be in proportion to the rate times √(1 - "
    "1/P), which gives 1.22, 1.08 and 1.04 of a doubling up to 16; found are 1.07, 0.96 and 1.08. So D tells of "
    "the rate more than of what accuracy bears. A seed is left out if either of the two trainings has collapsed.",
    draw=draw_distances,
)
