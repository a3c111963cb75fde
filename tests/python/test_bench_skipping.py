"""The parameter skipping benchmark: what is made of measurements, and short runs of its parts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import skipping
from claims.skipping import communication, detection, report, training, worker
from results import ResultsOf
from sordino.algorithms.caps.statistics import Point, SkippingStatistics
from sordino.timing import Samples


def trained(name: str, accuracy: float, threshold: float | None = None, probes: int | None = None) -> dict[str, Any]:
    row = {"name": name, "accuracy": accuracy, "threshold": threshold, "probes": probes}
    return row | {"bytes": 80.0 if name == "naive" else 100.0}


def sweep(*accuracies: float) -> list[dict[str, Any]]:
    """Unskipped, then thresholds that rise from 10 by 10."""
    rows = [trained(f"{10 * k} %", value, threshold=10.0 * k) for k, value in enumerate(accuracies[1:], start=1)]
    return [trained("unskipped", accuracies[0]), *rows]


@pytest.mark.parametrize(
    ("accuracies", "at"),
    [
        ((0.9, 0.8, 0.89, 0.9), 20.0),  # from high to low
        ((0.9, 0.8, 0.9, 0.9), 10.0),
        ((0.9, 0.9, 0.9, 0.8), 30.0),
        ((0.9, 0.896, 0.95, 0.9), None),
        ((0.9,), None),
    ],
)
def test_where_accuracy_starts_to_suffer(accuracies: tuple[float, ...], at: float | None) -> None:
    assert training.suffers_at(sweep(*accuracies), "threshold") == at


def test_more_steps_between_probes_skip_more() -> None:
    rows = [trained("unskipped", 0.9), *[trained(f"{k}", 0.9 - k / 1000, probes=k) for k in (10, 2, 6)]]
    assert [row["probes"] for row in report.swept(rows, "probes")] == [2, 6, 10]
    assert training.suffers_at(rows, "probes") == 6
    assert report.swept(rows, "threshold") == []


def test_targets_of_training_are_of_the_defaults() -> None:
    rows = [trained("unskipped", 0.9), trained("naive", 0.897, 10.0, 4), trained("naive, 1 %", 0.5, 1.0)]
    assert [one["met"] for one in training.targets(rows)] == [True, True]
    rows[1] |= {"accuracy": 0.89, "bytes": 100.0}
    assert [one["met"] for one in training.targets(rows)] == [False, False]


def test_every_contestant_has_a_name_and_the_sweeps_have_the_defaults() -> None:
    found = training.contestants(training.THRESHOLDS, training.PROBES)
    assert len({one.name for one in found}) == len({one.algorithm for one in found}) == len(found) == 13
    assert found[0].algorithm.threshold > 100
    assert {one.threshold for one in found} == {None, *training.THRESHOLDS}
    assert {one.probes for one in found} == {None, *training.PROBES}


def test_a_summary_has_the_mean_of_all_seeds_and_the_course_of_the_first() -> None:
    def run(accuracy: float, sent: int) -> dict[str, Any]:
        statistics = SkippingStatistics(1)
        statistics.names = ["weight"]
        statistics.points = [Point(7, 7, 10.0, [0.12345], None, [0.5], sent, 100, 1.0)]
        return {"accuracy": accuracy, "bytes": 2.0 * sent, "right": True, "statistics": statistics}

    one = training.contestants([], [])[1]
    found = training.summary(one, [run(0.8, 40), run(0.9, 60)])
    assert found["accuracy"] == pytest.approx(0.85)
    assert found["spread"] == pytest.approx(0.1 / 2**0.5)
    assert (found["share"], found["bytes"]) == (0.5, 100.0)
    assert found["points"] == [{"step": 7, "threshold": 10.0, "ratios": [0.123], "share": 0.4}]
    assert training.summary(one, [run(0.8, 40)])["spread"] is None


def test_one_step_of_an_interval_is_a_survey() -> None:
    plain, survey = Samples([np.array([1.0]), np.array([3.0])]), Samples([np.array([21.0]), np.array([3.0])])
    assert detection.over_an_interval(plain, survey, 20)["median"] == 2.5


def test_targets_of_detection() -> None:
    middles = {"count": 1.2, "torch": 1.1, "add": 1.0, "naive": 2.0, "random": 0.3, "history": 2.1}
    row = {"granularity": "tensor", "floor": "torch", "times": {name: {"median": one} for name, one in middles.items()}}
    assert [one["met"] for one in detection.targets([row])] == [True, False, True, False]


def test_communication_is_compared_within_a_job() -> None:
    values = {"unskipped": (2.0, 100.0), "naive": (1.5, 80.0), "random": (1.8, 90.0), "history": (2.2, 100.0)}
    entries = {name: {"exposed": {"mean": mean}, "bytes": sent} for name, (mean, sent) in values.items()}
    row = {"hosts": 4, "ranks_per_host": 1, "contestants": entries}
    assert report.over_unskipped(row, "naive", "exposed") == 0.75
    assert report.over_unskipped(row, "naive", "bytes") == 0.8
    assert report.where(row) == "4 hosts, 1 rank on each"
    assert [one["met"] for one in communication.targets([row])] == [True, True, False]


@pytest.mark.run_of_a_benchmark
def test_detection_runs(tmp_path: Path, results_of: ResultsOf) -> None:
    words = [str(Path(skipping.__file__)), "detection", "--quick", "--results", str(tmp_path)]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = results_of("skipping_detection")
    assert found["wrong"] == []
    by_tensor, by_block = found["rows"]
    assert by_tensor["items"] < by_block["items"]
    assert by_tensor["times"].keys() == set(report.WAYS)
    assert set(report.WAYS) - by_block["times"].keys() == {"eq", "eq fetched"}
    assert all(one["median"] > 0 for row in found["rows"] for one in row["times"].values())


@pytest.mark.run_of_a_benchmark
def test_training_runs(tmp_path: Path, results_of: ResultsOf) -> None:
    assert skipping.main(["training", "--quick", "--results", str(tmp_path)]) == 0
    found = results_of("skipping_training")
    assert found["wrong"] == []
    rows = {row["name"]: row for row in found["rows"]}
    assert rows["unskipped"]["share"] == 1.0
    # Every fifth step alone sends, of two epochs of ten.
    assert rows["naive, 0 %"]["share"] == pytest.approx(0.2)
    assert rows["naive, 0 %"]["bytes"] == pytest.approx(0.2 * rows["unskipped"]["bytes"], rel=0.01)
    assert all(0.2 <= row["share"] <= 1 and row["accuracy"] > 0.5 for row in rows.values())
    for row in rows.values():
        assert [point["step"] for point in row["points"]] == list(range(1, 21))
        assert all(len(point["ratios"]) == len(row["tensors"]) == 8 for point in row["points"])
    assert len({point["threshold"] for point in rows["naive, scheduler"]["points"]}) > 1
    assert {point["threshold"] for point in rows["naive"]["points"]} == {10.0}


@pytest.mark.run_of_a_benchmark
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("emulated_hosts")
def test_communication_runs_on_hosts(tmp_path: Path, results_of: ResultsOf) -> None:
    assert skipping.main(["communication", "--quick", "--results", str(tmp_path)]) == 0
    found = results_of("skipping_communication")
    assert found["wrong"] == []
    for row in found["rows"]:
        assert row["contestants"].keys() == worker.contestants().keys()
        assert row["contestants"]["unskipped"]["share"] == 1.0
        for name, one in row["contestants"].items():
            assert one["exposed"]["mean"] > 0
            assert 0 < report.over_unskipped(row, name, "bytes") < 1.02
