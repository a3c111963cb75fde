"""Figure 9: speedup of EDSR by the number of processes."""

from __future__ import annotations

from claims.claim import Claim, Found, Plan
from claims.local_sgd import figure_10
from claims.local_sgd.paper import PAPER
from claims.local_sgd.scaling import Scaling, draw, judge
from sordino.plan import Rates

SCALING = Scaling("edsr", models=8, interval=4, batch=16, linear=32)


def plan(quick: bool) -> Plan:
    """Computing on a core, and the links of Figure 10's job."""
    timed = figure_10.QUICK if quick else figure_10.TIMED
    [line] = yield from SCALING.ask(quick)
    found = yield from timed.ask()
    speedups = SCALING.speedups(Rates.from_results(found[0]["rates"]), line)
    return Found(judge(SCALING, speedups), {"speedups": speedups})


CLAIM = Claim(
    name="local-sgd-figure-9",
    paper=PAPER,
    place="Figure 9",
    says="Synchronous SGD's speedup flattens at 64 processes; local SGD scales up to 64, better with shards than "
    "with whole models.",
    setting="EDSR on up to 64 KNL nodes with Cray Aries, P = 8, I = 4, B = 16; synchronous SGD with mini-batches of "
    "128.",
    here="Predicted by `sordino.plan.cost_of`, with what hides behind backward, for processes of one core of this "
    "machine (a residual block on patches of 48 x 48 is measured) on emulated hosts with links of "
    f"{figure_10.TIMED.mbps:g} Mbps (measured in Figure 10's job). It needs root.",
    plan=plan,
    why="",
    draw=draw,
)
