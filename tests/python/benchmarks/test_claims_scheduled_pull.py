"""The claims of scheduled pull gossip: values read from curves, verdicts, and results of the work functions."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from claims.evidence import DIRECTION, FAILS, HOLDS, OPEN
from claims.scheduled_pull import collisions, comparison, curves, simulations
from claims.scheduled_pull.comparison import QUICK, Judge, level_after_all, table_evidence
from claims.scheduled_pull.simulations import (
    NAMES,
    Simulation,
    accuracy_at,
    apart,
    best,
    level,
    mean_until,
    reached,
    rise,
    simulate,
)
from sordino.simulate.record import Span


def run_of(*accuracies: float, seconds: float = 4.0, end: float = 1.0) -> dict[str, Any]:
    """Return the result of a run whose curve has these accuracies, in percent, evenly spaced in time."""
    step = seconds / (len(accuracies) - 1)
    curve = [[k * step, accuracy / 100, end] for k, accuracy in enumerate(accuracies)]
    return {"accuracy": accuracies[-1] / 100, "seconds": seconds, "waiting": 0.0, "age": 1.0, "curve": curve}


def test_levels_and_bests_are_of_equal_time() -> None:
    run = run_of(10, 50, 70, 80, 80, 90, seconds=5.0)
    assert accuracy_at(run, [0.5, 3.5, 9.0]) == pytest.approx([30, 80, 90])
    assert level(run, 4.0) == pytest.approx(80) and best(run, 4.0) == pytest.approx(80)
    assert best(run, 5.0) == pytest.approx(90) and level_after_all(run) == pytest.approx(85, abs=1)
    assert rise(run, 4.0) == pytest.approx(5, abs=0.5) and rise(run_of(80, 80, 80, 80, 80), 4.0) == pytest.approx(0)


def test_how_soon_and_how_far_apart() -> None:
    run, slower = run_of(0, 40, 80, 80, 80), run_of(0, 20, 40, 60, 80)
    assert (
        reached(run, 60) == pytest.approx(1.5) and reached(slower, 60) == pytest.approx(3) and reached(run, 81) is None
    )
    assert apart(run, run, 4.0) == 0 and apart(run, slower, 4.0) == pytest.approx(20, abs=0.5)
    assert mean_until(run, 4.0) > mean_until(slower, 4.0)


def runs(gain: float, slow: float, spread: float = 0.1) -> comparison.Runs:
    """Return runs of three seeds: scheduled ones are better by `gain` points, and runs without overlap take `slow`
    times as long."""
    found: comparison.Runs = {}
    for mode in NAMES:
        high = {"none": 80.0, "naive": 78.0}.get(mode, 80.0 + gain)
        some = []
        for k in range(3):
            top = high + spread * k * (mode == "manager") + k  # seeds differ by more than modes do
            seconds = QUICK.seconds * (slow if mode == "none" else 1)
            some.append(run_of(10, 60, top, top, top, top, top, top, top, seconds=seconds))
        found |= {(mode, wide): some for wide in (0, 2)}
    return found


SOURCE = {wide: {"manager": 86.5, "autonomous": 86.5, "none": 86.0} for wide in (0, 2)}


def verdicts(found: comparison.Runs) -> dict[str, str]:
    return {one.what: one.verdict for one in table_evidence(found, QUICK, SOURCE, (0, 2))}


def test_a_gain_is_judged_seed_by_seed_at_equal_time_and_at_equal_steps() -> None:
    found = verdicts(runs(0.5, 1.2))
    headline = next(iter(found))
    assert headline.startswith("scheduled, manager - no overlap, best accuracy in equal time")
    assert found[headline] == HOLDS
    assert found["scheduled, autonomous - no overlap, level at equal steps, points, within 0.3"] == FAILS  # 0.5
    assert found["naive overlap - no overlap, level at equal time, points"] == HOLDS
    assert verdicts(runs(0.05, 1.2, 0.01))[headline] == DIRECTION  # certainly less than half of 0.5
    assert verdicts(runs(-0.5, 1.2))[headline] == FAILS
    assert verdicts(runs(0.0, 1.2, 0.0))[headline] == OPEN


def test_what_collapsed_is_counted_and_not_averaged_in() -> None:
    found = runs(0.5, 1.2)
    found["none", 2] = [run_of(10, 10, 10, 10, 10), *found["none", 2][1:]]
    judge = Judge(found, (0, 2))
    assert judge.collapses == 1
    assert judge.gains("manager", "none", level_after_all) == pytest.approx([0.6, 0.7])
    assert table_evidence(found, QUICK, SOURCE, (0, 2))[0].collapsed == 1


def test_curves_are_compared_with_those_over_fast_links() -> None:
    found = runs(0.0, 1.2)
    found["none", comparison.ALL_WIDE] = found["manager", 0]
    evidence = curves.curve_evidence(found, QUICK, (0, 2), found["naive", 0][0])
    met = {one.what.split(":")[0]: one.verdict for one in evidence}
    assert met["scheduled, manager is closer than no overlap to no overlap over links that are all wide"] == HOLDS
    assert evidence[-1].verdict == HOLDS and evidence[-1].ours == 0
    soon = [one for one in evidence if "time to 97%" in one.what]
    assert [one.verdict for one in soon] == [HOLDS, HOLDS] and soon[0].ours == pytest.approx(1 / 1.2, rel=0.02)


def test_pulls_meet_where_they_overlap_at_one_peer() -> None:
    def pull(worker: int, peer: int, begin: float, end: float) -> Span:
        return Span(worker, "transfer", begin, end, peer)

    apart = [pull(0, 1, 0, 1), pull(2, 1, 1, 2), pull(0, 3, 0, 2)]
    assert collisions.share_met(apart) == 0
    assert collisions.share_met([*apart, pull(4, 1, 0.5, 1.5)]) == 0.75
    assert collisions.share_met([pull(0, 1, 0, 9), pull(2, 1, 1, 2), pull(3, 1, 4, 5)]) == 1


def test_scheduled_pulls_do_not_meet_and_others_do() -> None:
    found = {mode: collisions.meetings(mode, 2, 1, "fair", 20, 3.5, 10.0) for mode in NAMES}
    assert found["manager"]["met"] == found["autonomous"]["met"] == 0 < 0.2 < found["naive"]["met"]
    assert found["none"]["pull"] > 1.1 * collisions.meetings("none", 2, 1, "none", 20, 3.5, 10.0)["pull"]


TINY = replace(QUICK, images=256, steps=48)


def test_a_simulation_is_that_of_the_command() -> None:
    words = Simulation(TINY, "manager", 2, 3, "fair").words
    for option in ("--wide 2", "--seed 3", "--sharing fair", "--images 256", "--message-mib 3.5", "--compute-ms 10.0"):
        assert option in " ".join(words)
    found = simulate(asdict(TINY), mode="none", wide=0, seed=1)
    pull = 5e-3 + 8e-9 * 3.5 * 2**20
    assert found["seconds"] == pytest.approx(TINY.seconds + 2 * pull)  # after the third window the run is over
    assert found["waiting"] == pytest.approx(2 * pull / found["seconds"]) and found["age"] == pytest.approx(pull)
    assert len(found["curve"]) == 6 and found["curve"][-1][0] == pytest.approx(found["seconds"])


def test_naive_overlap_computes_the_same_whatever_the_links() -> None:
    slow, fast = (simulate(asdict(TINY), mode="naive", wide=wide, seed=1) for wide in (0, 8))
    assert slow["curve"] == fast["curve"]


def test_the_work_of_a_run_is_this_function() -> None:
    run = Simulation(TINY, "none", 0, 1).run
    assert run.work == f"{simulations.__name__}:simulate" and run.settings["task"]["images"] == 256
