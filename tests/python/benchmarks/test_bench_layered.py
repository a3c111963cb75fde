"""The Layered SGD benchmark: results from measurements, and a short run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import layered
from results import ResultsOf
from timings.layered import report


def row(exposed: dict[str, list[float]]) -> dict[str, Any]:
    loads = ("0", "0.5", "1", "2")
    contestants = {
        name: {"exposed": {load: {"median": value} for load, value in zip(loads, values)}, "right": True}
        for name, values in exposed.items()
    }
    place = {"set": "resnet50", "place": "hosts", "hosts": 2, "workers": 4, "mode": "thread"}
    return place | {"whole": 2.0, "contestants": contestants}


def test_what_is_hidden_is_a_part_of_all_reduce() -> None:
    one = row({"AllReduce": [2.0, 2.0, 2.0, 2.0], "Layered": [2.1, 1.0, 0.05, 0.2]})
    assert report.hidden(one, "Layered", "0.5") == 0.5
    assert report.hidden(one, "AllReduce", "1") == 0
    assert report.efficiency(one, "AllReduce", "1") == 0.5
    assert report.efficiency(one, "Layered", "2") == pytest.approx(4 / 4.2)
    met = [target["met"] for target in layered.targets([one, row({"Horovod": [1.0] * 4})])]
    assert met == [True, False, True]


@pytest.mark.run_of_a_benchmark
@pytest.mark.timeout(240)
def test_a_short_run(emulated_hosts: None, tmp_path: Path, results_of: ResultsOf) -> None:
    assert layered.main(["--quick", "--results", str(tmp_path)]) == 0
    results = results_of("layered")
    modes = {(one["place"], one["mode"]) for one in results["rows"]}
    assert modes >= {("here", "thread"), ("hosts", "thread"), ("hosts", "rank")}
    assert results["wrong"] == []
    assert "Horovod" in results["baselines"]
    for one in results["rows"]:
        for contestant in one["contestants"].values():
            assert all(entry["median"] > 0 for entry in contestant["exposed"].values())
