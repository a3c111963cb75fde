"""Figure 6: communication in a step with the parameters of ResNet-20."""

from __future__ import annotations

from claims.claim import Claim, Plan
from claims.local_sgd.timed import Communication, communication, draw
from claims.papers import LOCAL_SGD

TIMED = Communication("resnet20", 8, ((4, 2), (2, 2), (4, 1)), 100.0, turns=8, rounds=6, budget=15.0)
QUICK = Communication("resnet20", 8, ((2, 2),), 2000.0, turns=2, rounds=2, budget=1.0)


def plan(quick: bool) -> Plan:
    """Jobs of several P and K."""
    return communication(QUICK if quick else TIMED)


CLAIM = Claim(
    name="local-sgd-figure-6",
    paper=LOCAL_SGD,
    place="Figure 6 and equations 5 to 8",
    says="Local SGD communicates less than synchronous SGD, and averaging shards takes 1/K of what averaging whole "
    "models does.",
    setting="ResNet-20 on up to 128 KNL nodes with Cray Aries, P = 4, I = 8.",
    here=f"The 0.27 M parameters of ResNet-20 on up to 8 emulated hosts of one worker with links of {TIMED.mbps:g} "
    f"Mbps, nothing computed; all ways in turns in one job, {TIMED.turns} turns. Predictions are equations 3 to 8 as "
    "`sordino plan` has them, with links measured in the same job. It needs root.",
    plan=plan,
    why="Both parts hold: with P = 4 and K = 2 local SGD communicates 0.65 times as long in a step as synchronous "
    "SGD, and averaging shards takes 0.50 times as long as averaging whole models, as 1/K says. In a whole step "
    "shards save less, 13 %, for gradients are averaged within a group in every step and models every eighth. "
    "With K = 1 nothing but models is sent: 0.125 times as long, 1/I. What equations 3 to 8 predict from links "
    "measured in the same job is within 8 % of what is measured for all ways and shapes.",
    draw=draw,
)
