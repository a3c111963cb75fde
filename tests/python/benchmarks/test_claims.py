"""Claims: their verdicts, runs that are done once and never lost, and a page that matches the command's output."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from claims import catalogue, evidence, page, running
from claims.claim import Claim, Found, Paper, Plan, Run, play
from claims.evidence import DIRECTION, FAILS, HOLDS, OPEN, above, below, exact, within
from claims.running import Runner
from claims.training import Training, load, train
from sordino.errors import NotBuilt, UsageError
from sordino.pool import pool

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "benchmarks" / "results" / "claims"
TINY: dict[str, Any] = {"data": "digits", "images": 256, "held_out": 64, "epochs": 1}
PAPER = Paper("some-paper", "Some", "Some paper", "An idea.", "Everything is smaller.")


# --- Evidence ---------------------------------------------------------------------------------------------------------


def test_a_mean_has_its_standard_error() -> None:
    assert evidence.mean_and_error([1.0, 2.0, 3.0]) == (2.0, pytest.approx(3**-0.5))
    assert evidence.mean_and_error([4.0]) == (4.0, None)
    with pytest.raises(ValueError, match="no values"):
        evidence.mean_and_error([])


@pytest.mark.parametrize(
    ("values", "source", "verdict"),
    [
        ([2.0, 3.0, 4.0], None, HOLDS),  # 3 ± 0.58
        ([1.0, 1.0, 1.0], None, HOLDS),
        ([0.0, 1.0, 2.0], None, OPEN),  # 1 ± 0.58
        ([-2.0, -3.0, -4.0], None, FAILS),
        ([5.0], None, OPEN),  # one value shows nothing
        ([2.0, 3.0, 4.0], 8.0, HOLDS),  # it may be up to 4.15, half of 8
        ([2.0, 3.0, 4.0], 9.0, DIRECTION),
        ([], None, OPEN),
    ],
)
def test_what_is_above_is_beyond_two_standard_errors(values: list[float], source: float | None, verdict: str) -> None:
    assert above("it", values, source=source).verdict == verdict
    turned = below("it", [-value for value in values], source=None if source is None else -source)
    assert turned.verdict == verdict and (turned.ours is None or turned.ours == -(above("it", values).ours or 0.0))
    assert above("it", [value + 7 for value in values], 7.0, None if source is None else source + 7).verdict == verdict


def test_what_is_alike_lies_surely_within_the_margin() -> None:
    assert within("it", [-0.1, 0.0, 0.1], 0.2).verdict == HOLDS
    assert within("it", [-0.1, 0.0, 0.1], 0.1).verdict == OPEN
    assert within("it", [1.9, 2.0, 2.1], 1.0).verdict == FAILS
    assert within("it", [0.0], 1.0).verdict == OPEN and within("it", [], 1.0).verdict == OPEN


def test_a_table_shows_errors_counts_and_collapses() -> None:
    text = page.evidence_table(
        [above("one", [2.0, 3.0, 4.0], collapsed=2), exact("two", 3.0, True, note="by counting")]
    )
    assert "3 ± 0.58 (3, 2 collapsed)" in text and "- two: by counting" in text


# --- Runs -------------------------------------------------------------------------------------------------------------


def count(folder: str, number: int) -> dict[str, Any]:
    """Do the work of a run: leave a trace in the folder, and return a result."""
    with Path(folder, "done").open("a") as file:
        file.write(f"{number} ")
    if number < 0:
        raise UsageError(f"{number} is negative")
    return {"value": number * 1.00000049, "layers": {"9": 0.0, "10": 1.0}}


def claim_of(folder: Path, numbers: Sequence[int], seen: list[Any] | None = None) -> Claim:
    """Return a claim that asks for the runs with these numbers, and then for the run with the first number again."""

    def plan(quick: bool) -> Plan:
        found = yield [run_of(folder, number) for number in numbers]
        more = yield [run_of(folder, numbers[0])]
        if seen is not None:
            seen.append([one["value"] for one in (*found, *more)])
        layers = [list(one["layers"]) for one in found]  # a network's first and last layer are known by their order
        return Found([exact("the sum", sum(one["value"] for one in found), True)], {"layers": layers})

    return Claim("a-claim", PAPER, "Figure 1", "It says so.", "Elsewhere.", "Here.", plan, "Because.")


def run_of(folder: Path, number: int) -> Run:
    return Run(f"{__name__}:count", {"folder": str(folder), "number": number}, alone=True)


def test_runs_are_named_by_what_they_do_and_not_by_what_they_cost() -> None:
    one = Run("a:b", {"x": 1, "y": 2})
    assert one.key == Run("a:b", {"y": 2, "x": 1}, cost=9.0, alone=True).key
    assert one.key not in {Run("a:b", {"x": 1, "y": 3}).key, Run("a:c", {"x": 1, "y": 2}).key}


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessPoolExecutor]:
    with pool(1) as found:
        yield found


def test_a_run_is_done_once_and_an_interruption_loses_none(tmp_path: Path, processes: ProcessPoolExecutor) -> None:
    seen: list[Any] = []
    runner = Runner(tmp_path / "kept", processes)
    with pytest.raises(UsageError, match="-1 is negative"):
        runner.settle(claim_of(tmp_path, (3, -1, 5)), False, {})
    assert (tmp_path / "done").read_text() == "3 -1 "
    found, entries = runner.settle(claim_of(tmp_path, (3, 5, 3), seen), False, {})
    assert (tmp_path / "done").read_text() == "3 -1 5 "
    assert seen == [[3.0, 5.0, 3.0, 3.0]] and found.evidence[0].ours == 11.0  # six digits are kept
    assert [one["settings"]["number"] for one in entries] == [3, 5]
    for path in (tmp_path / "kept").iterdir():
        path.write_text("{" if "5" in path.read_text() else json.dumps({"work": 1}))
    Runner(tmp_path / "kept", processes).settle(claim_of(tmp_path, (3, 5)), False, {})
    assert (tmp_path / "done").read_text() == "3 -1 5 3 5 "


def test_a_file_is_read_as_it_was_written_and_what_is_missing_is_said(
    tmp_path: Path, processes: ProcessPoolExecutor
) -> None:
    claim = claim_of(tmp_path, (3, 5))
    found, entries = Runner(tmp_path / "kept", processes).settle(claim, False, {})
    path = tmp_path / "a-claim.json"
    running.write(path, claim, entries)
    known = running.read(path)
    again, asked = running.replay(claim, known)
    assert again == found and asked == set(known) == {run_of(tmp_path, 3).key, run_of(tmp_path, 5).key}
    with pytest.raises(UsageError, match=r"'number': 7.*python -m benchmarks.claims run a-claim"):
        running.replay(claim_of(tmp_path, (3, 7)), known)
    path.write_text(path.read_text()[:-20])
    with pytest.raises(UsageError, match="not a claim's file"):
        running.read(path)
    assert running.read(tmp_path / "none.json") == {}


def test_play_sends_what_was_found() -> None:
    def plan(quick: bool) -> Plan:
        [one] = yield [Run("a:b", {"quick": quick})]
        return Found([exact("it", one["x"], True)])

    claim = Claim("one", PAPER, "Figure 1", "", "", "", plan, "")
    assert play(claim, True, lambda runs: [{"x": float(run.settings["quick"])} for run in runs]).evidence[0].ours == 1.0


# --- Trainings --------------------------------------------------------------------------------------------------------


def test_images_held_out_are_not_trained_on() -> None:
    data = load("digits", 1024, 256)
    shown = {image.numpy().tobytes() for image in data["train"][0]}
    assert len(data["train"][1]) == 1024 and len(data["validation"][1]) == 256
    for part in ("validation", "test"):
        assert not any(image.numpy().tobytes() in shown for image in data[part][0])


def test_what_averages_everything_trains_the_same_model() -> None:
    one, two = (train(**Training("allreduce", workers, 32, 0.1, 1, **TINY).run.settings) for workers in (1, 2))
    assert one["consensus_distance"] == [0.0] and one["steps"] == 8
    assert two["test"] == pytest.approx(one["test"], abs=0.01) and two["consensus_distance"][0] < 1e-6


def test_workers_of_gossip_differ_and_a_training_that_diverges_says_so() -> None:
    gossip = Training("crossover", 4, 32, 0.1, 1, options={"seed": 1}, **TINY)
    assert train(**gossip.run.settings)["consensus_distance"][0] > 1e-4
    wild = Training("crossover", 4, 32, 1e30, 1, **TINY)
    assert train(**wild.run.settings)["consensus_distance"] == [None]


# --- All claims -------------------------------------------------------------------------------------------------------


def test_claims_have_names_of_their_own_and_say_what_they_are() -> None:
    names = [claim.name for claim in catalogue.CLAIMS]
    assert len(set(names)) == len(names)
    for claim in catalogue.CLAIMS:
        assert claim.says and claim.setting and claim.here and claim.paper.idea and claim.paper.smaller


@pytest.mark.parametrize("claim", catalogue.CLAIMS, ids=lambda claim: claim.name)
def test_what_is_committed_is_what_the_command_makes_now(claim: Claim) -> None:
    """The file has the settings and seeds of the code: no run is missing, and none is left over."""
    known = running.read(RESULTS / f"{claim.name}.json")
    if known:
        found, asked = running.replay(claim, known)
        assert asked == set(known), f"runs left over: python -m benchmarks.claims run {claim.name}"
        assert found.evidence and claim.why


def test_the_page_is_made_from_what_is_committed() -> None:
    founds = {claim.name: page.found_of(claim, RESULTS) for claim in catalogue.CLAIMS}
    for name, text in page.pages(founds).items():
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == text, "python -m benchmarks.claims report"
        assert max((len(line) for line in text.splitlines() if line.startswith("|")), default=0) <= 160


@pytest.mark.run_of_a_benchmark
@pytest.mark.parametrize("claim", catalogue.CLAIMS, ids=lambda claim: claim.name)
def test_a_claim_runs_in_small(claim: Claim, tmp_path: Path, processes: ProcessPoolExecutor) -> None:
    try:
        found, entries = Runner(tmp_path, processes).settle(claim, True, {})
    except NotBuilt as error:  # no hosts can be made, or there is no MPI
        pytest.skip(str(error))
    assert found.evidence and entries
    if claim.draw is not None:
        from matplotlib import pyplot

        claim.draw(found.shapes, pyplot.figure())
