"""Figure 5: speedup of ResNet-20 by the number of processes."""

from __future__ import annotations

from claims.claim import Claim, Found, Plan
from claims.local_sgd import figure_6
from claims.local_sgd.paper import PAPER
from claims.local_sgd.scaling import Scaling, draw, judge
from claims.local_sgd.timed import judge as judge_communication
from sordino.plan import Rates

SCALING = Scaling("resnet20", models=4, interval=8, batch=128, linear=16)


def plan(quick: bool) -> Plan:
    """Computing on a core, and the links of Figure 6's first job."""
    timed = figure_6.QUICK if quick else figure_6.TIMED
    [line] = yield from SCALING.ask(quick)
    found = yield from timed.ask()
    speedups = SCALING.speedups(Rates.from_results(found[0]["rates"]), line)
    return Found([*judge(SCALING, speedups), *judge_communication(timed, found)[-3:]], {"speedups": speedups})


CLAIM = Claim(
    name="local-sgd-figure-5",
    paper=PAPER,
    place="Figure 5",
    says="Synchronous SGD's speedup flattens at 32 processes; local SGD that averages shards is almost linear up to "
    "16 and best everywhere, that of whole models flattens at 64.",
    setting="ResNet-20 on up to 128 KNL nodes with Cray Aries, P = 4, I = 8, B = 128; synchronous SGD with "
    "mini-batches of 512.",
    here="Predicted by `sordino.plan.cost_of`, with what hides behind backward, for processes of one core of this "
    f"machine (computing is measured) on emulated hosts with links of {figure_6.TIMED.mbps:g} Mbps (measured in "
    "Figure 6's job, where predictions are compared with measurements). It needs root.",
    plan=plan,
    why="",
    draw=draw,
)
