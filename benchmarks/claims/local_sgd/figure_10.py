"""Figure 10: communication in a step with the parameters of EDSR."""

from __future__ import annotations

from claims.claim import Claim, Plan
from claims.local_sgd.timed import Communication, communication, draw
from claims.papers import LOCAL_SGD

TIMED = Communication("edsr", 4, ((2, 2),), 1000.0, turns=4, rounds=1, budget=15.0)
QUICK = Communication("resnet20", 4, ((2, 2),), 2000.0, turns=2, rounds=2, budget=1.0)


def plan(quick: bool) -> Plan:
    """One job."""
    return communication(QUICK if quick else TIMED)


CLAIM = Claim(
    name="local-sgd-figure-10",
    paper=LOCAL_SGD,
    place="Figure 10",
    says="Local SGD communicates less than synchronous SGD, and averaging shards takes 1/K of what averaging whole "
    "models does.",
    setting="EDSR on up to 64 KNL nodes with Cray Aries, P = 8, I = 4.",
    here=f"The 40.7 M parameters of EDSR on 4 emulated hosts of one worker with links of {TIMED.mbps:g} Mbps, "
    f"nothing computed; all ways in turns in one job, {TIMED.turns} turns. Predictions are equations 3 to 8 as "
    "`sordino plan` has them, with links measured in the same job. It needs root.",
    plan=plan,
    why="Both parts hold: in a step local SGD communicates 0.79 times as long as synchronous SGD, and averaging "
    "shards takes 0.65 times as long as averaging whole models, where its bytes are a half. In a whole step "
    "shards save 6 %, not half: within a group gradients are averaged in every step, which is most of what is "
    "sent, and models only every fourth. What equations 3 to 8 predict from links measured in the same job is "
    "within 6 % of what is measured.",
    draw=draw,
)
