"""Figures 4 to 6: the learning curves of Table 2's trainings."""

from __future__ import annotations

from claims.claim import Claim, Plan
from claims.wide_area.comparison import SEEDS, TABLE_2
from claims.wide_area.curves import curves, draw_curves
from claims.wide_area.paper import PAPER


def plan(quick: bool) -> Plan:
    """The curves of all modes by the numbers of wide links."""
    return (yield from curves(TABLE_2, quick))


CLAIM = Claim(
    name="wan-figures-4-to-6",
    paper=PAPER,
    place="Figures 4 to 6",
    says="VGG16 on CIFAR-100: of the three ways the scheduled one comes closest to the curve of links that are all "
    "wide, and naive overlap is worst; more wide links make the scheduled one faster, and naive overlap not.",
    setting="The trainings of Table 2; accuracy against time, with 0, 2 and 6 wide links.",
    here=f"The trainings of the stand-in for Table 2; {SEEDS} seeds.",
    plan=plan,
    why="",
    draw=draw_curves,
)
