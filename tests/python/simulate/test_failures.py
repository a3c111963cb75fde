"""Goodput with failures: against closed forms, and the spread of a pause to other workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lockstep_cases import job_of

from sordino.algorithms import ADPSGD, DPSGD, Algorithm, AllReduce, Crossover, DiLoCo, Layered, LocalSGD, PushSum
from sordino.cli.app import main
from sordino.simulate.failures import _share, drawn, goodput_of, share_of
from sordino.simulate.job import Failures
from sordino.simulate.lockstep import messages_of

WORDS = ["allreduce", "--data", "none", "--workers", "4", "--steps", "3"]
FAILING = ["--mtbf", "1000", "--recover", "50"]


def results(path: Path, *words: str) -> dict[str, Any]:
    """Return the JSON of `sordino simulate`, without its own run time."""
    assert main(["simulate", "--algorithm", *words, "--quiet", "--json", str(path)]) == 0
    found: dict[str, Any] = json.loads(path.read_text())
    return {name: value for name, value in found.items() if not name.startswith("wall_")}


def lost(goodput: float, wanted: float) -> None:
    """Compare the lost parts of two goodputs; the first is measured over 20,000 failures."""
    assert 1 - goodput == pytest.approx(1 - wanted, rel=0.03)


@pytest.mark.parametrize(("workers", "mtbf", "recover"), [(1, 10.0, 1.0), (64, 1e5, 300.0), (10_000, 1e6, 60.0)])
@pytest.mark.parametrize("pause", [0.0, 0.5])
def test_closed_forms(workers: int, mtbf: float, recover: float, pause: float) -> None:
    lost(drawn(workers, mtbf, 0.0, recover, 1), 1 / (1 + workers * recover / mtbf))
    at_work = mtbf / (mtbf + recover)  # a worker's share of the time, without pauses
    if pause == 0:
        lost(drawn(workers, mtbf, recover, 0.0, 1), at_work)
    elif workers > 1:
        # While all pause no worker fails, so a worker is away for a smaller part of the time.
        paused = 1 / (1 + workers * at_work * pause / mtbf)
        at_work = mtbf / (mtbf + recover * paused)
        paused = 1 / (1 + workers * at_work * pause / mtbf)
        lost(drawn(workers, mtbf, recover, pause, 1), at_work * paused)


def test_failures_follow_the_seed() -> None:
    assert drawn(8, 100.0, 1.0, 0.1, 3) == drawn(8, 100.0, 1.0, 0.1, 3) != drawn(8, 100.0, 1.0, 0.1, 4)


def share(algorithm: Algorithm, workers: int = 8, pause: float = 5.0, **options: Any) -> float:
    job = job_of(algorithm, workers, **options)
    return share_of(job, messages_of(job), pause)


@pytest.mark.parametrize(
    "algorithm", [AllReduce(), LocalSGD(interval=3), LocalSGD(2, 4, "allreduce"), Crossover(), PushSum(), Layered()],
)  # fmt: skip
def test_a_pause_spreads_to_all_that_step_together(algorithm: Algorithm) -> None:
    assert share(algorithm) == pytest.approx(1.0)


def test_a_pause_does_not_spread_to_workers_that_do_not_wait() -> None:
    assert share(ADPSGD()) == 1 / 8
    # All workers but the failed one pause. It awaits their messages three steps later, which hides a short pause.
    hidden = DiLoCo(interval=4, outer_momentum=0.5, overlap=3)
    assert share(hidden, pause=0.02) == pytest.approx(7 / 8)
    assert share(hidden, pause=50.0) == pytest.approx(1.0, abs=1e-2)
    assert share(AllReduce(), workers=1) == share(AllReduce(), pause=0.0) == 0.0


def test_a_pause_spreads_along_a_ring() -> None:
    assert share(DPSGD(), workers=8) == pytest.approx(1.0)
    assert 0.01 < share(DPSGD(), workers=2000) < 0.1


def test_workers_that_wait_in_any_case_lose_nothing_by_a_pause() -> None:
    """The slowest worker fails, and the pause of the others is shorter than their wait for it."""
    job = job_of(AllReduce(), 4, compute=np.array([0.01, 0.01, 0.01, 1.0]))
    assert _share(job, messages_of(job), 0.1, 3) == 0.0
    assert _share(job, messages_of(job), 0.1, 0) == pytest.approx(1.0)


def test_ways_follow_from_traits() -> None:
    failures = Failures(1e5, 100.0, 10.0)

    def ways(algorithm: Algorithm) -> tuple[bool, bool]:
        job = job_of(algorithm, 8)
        found = goodput_of(job, messages_of(job), failures)
        return found.restart is not None, found.after_loss is not None

    assert ways(AllReduce()) == (True, True)
    assert ways(LocalSGD(group_size=2)) == ways(Layered()) == (True, False)
    assert ways(ADPSGD()) == (False, True)


def test_goodput_of_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = results(tmp_path / "plain.json", *WORDS)
    capsys.readouterr()
    found = results(tmp_path / "failing.json", *WORDS, *FAILING, "--pause-ms", "2000")
    shown = capsys.readouterr().out
    goodput = found["runs"][0].pop("goodput")
    assert found["setting"].pop("failures") == {"mtbf": 1000.0, "recover": 50.0, "pause": 2.0}
    assert plain["setting"].pop("failures") is None and plain["runs"][0].pop("goodput") is None
    assert found == plain
    lost(goodput["restart"], 1 / (1 + 4 * 50 / 1000))
    assert goodput["after_loss"] == pytest.approx(1000 / 1050 / (1 + 4 * 2 / 1000), rel=0.01)
    assert goodput["share"] == pytest.approx(1.0)
    assert f"{goodput['restart']:.1%} |" in shown and f"{goodput['after_loss']:.1%} |" in shown
    assert "pause for 2 s" in shown and "works again 50 s later" in shown


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--mtbf", "5"], "--mtbf 5: give --recover"),
        (["--recover", "5"], "--recover 5: give --mtbf"),
        (["--pause-ms", "5"], "--pause-ms 5: has no effect without --mtbf"),
        (["--mtbf", "0", "--recover", "1"], "--mtbf 0: must be above 0"),
        (["--mtbf", "nan", "--recover", "1"], "--mtbf nan: must be above 0"),
        (["--mtbf", "1", "--recover", "-1"], "--recover -1: must be at least 0"),
        (["--mtbf", "1", "--recover", "inf"], "--recover inf: must be at least 0, and at most"),
        ([*FAILING, "--pause-ms", "-1"], "--pause-ms -1: must be at least 0"),
    ],
)
def test_failures_that_cannot_be(words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--algorithm", *WORDS, *words]) == 2
    assert complaint in capsys.readouterr().err
