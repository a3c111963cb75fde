"""Random jobs that lose ranks and gain ranks at random moments: they end, and the ranks at the end agree.

`SORDINO_TEST_JOINS` is the number of jobs (60), `SORDINO_TEST_SEED` the seed.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from growing import Grown, Plan, run_job
from test_join import reference

from sordino._core import build_info

_ALGORITHMS: list[tuple[str, list[str]]] = [
    ("allreduce", []),
    ("allreduce", []),
    ("crossover", []),
    ("crossover", ["group_size=2"]),
    ("dpsgd", []),
    ("push-sum", ["overlap=1"]),
    ("local-sgd", ["interval=3"]),
    ("diloco", ["interval=3"]),
    ("noloco", ["interval=2"]),
    ("caps", []),
    ("scheduled-pull", []),
]
_JOBS = int(os.environ.get("SORDINO_TEST_JOINS", 60))
_SEED = int(os.environ.get("SORDINO_TEST_SEED", 0))
_MOMENTS = ("invited", "met", "adopted", "made")


def drawn(seed: int) -> tuple[int, Plan, int, dict[str, str]]:
    """Return the number of ranks, the plan, the number of replacements, and variables of a job."""
    draw = random.Random(f"{_SEED}.{seed}")
    ranks, replaced = draw.choice((3, 3, 4)), draw.randint(1, 3)
    algorithm, settings = draw.choice(_ALGORITHMS)
    if settings == ["group_size=2"]:
        ranks = 4
    steps = draw.randint(10, 20)
    kill: dict[str, int] = {}
    for victim in draw.sample(range(ranks), draw.randint(1, ranks - 2)):
        kill[str(victim)] = draw.randrange(1, steps // 2)
    strike = {}
    if draw.random() < 0.7:
        victim = draw.choice([rank for rank in range(ranks + replaced) if str(rank) not in kill])
        strike[str(victim)] = draw.choice(_MOMENTS if victim >= ranks else _MOMENTS[1:])
    hold = draw.randrange(steps // 2, steps)
    alive = ranks - len(kill)
    leave = {}
    if draw.random() < 0.3:
        leaver = draw.choice([rank for rank in range(ranks) if str(rank) not in kill])
        leave[str(leaver)], alive = draw.randrange(1, hold), alive - 1
    plan = Plan(algorithm, settings, steps=steps, hold=hold, size=alive + 1, kill=kill, strike=strike, leave=leave)
    by_ucx = build_info()["ucx"] and draw.random() < 0.3
    variables = {"SORDINO_TRANSPORT": "ucx", "SORDINO_RANKS_PER_NODE": "2"} if by_ucx else {}
    # A rank that is struck is also replaced.
    return ranks, plan, replaced + len(kill) + len(strike), variables


@pytest.mark.drill("random joins")
@pytest.mark.parametrize("seed", range(_JOBS))
def test_random(tmp_path: Path, seed: int) -> None:
    ranks, plan, respawns, variables = drawn(seed)
    grown = run_job(tmp_path, ranks, plan, respawns, **variables)
    # If one rank leaves and the other is lost, nothing of the job remains.
    assert (grown.ended.status == 0) == bool(grown.parameters("end")), (plan, grown.output)
    if grown.ended.status != 0:
        assert plan.leave and plan.strike, (plan, grown.output)
        return
    require_agreement(grown, plan)


def require_agreement(grown: Grown, plan: Plan) -> None:
    """Check that the ranks at the end agree on the history of the job."""
    ends = grown.parameters("end")
    steps: dict[int, Any] = {}
    for rank in ends:
        for line in grown.log(rank):
            agreed = steps.setdefault(line["step"], sorted(line["ranks"]))
            if plan.algorithm == "allreduce":  # with others, ranks may notice a loss at different steps
                assert agreed == sorted(line["ranks"]), (rank, line, plan)
        if grown.log(rank):  # else it has joined at the end
            assert grown.log(rank)[-1]["step"] == plan.steps - 1
    if plan.algorithm == "allreduce":
        oldest = min(ends)
        assert all(one == ends[oldest] for one in ends.values())
        if grown.log(oldest)[0]["step"] == 0:
            np.testing.assert_allclose(ends[oldest], reference(grown, oldest), rtol=1e-11)
