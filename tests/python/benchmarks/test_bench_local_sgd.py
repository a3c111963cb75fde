"""The local SGD benchmark: results from measurements, and short runs of its parts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import local_sgd
from claims.local_sgd.worker import edsr_shapes, resnet20_shapes
from results import ResultsOf
from sordino._core import build_info
from timings.local_sgd import communication, plan
from timings.local_sgd.report import per_step


def entry(gradients: float, averaging: float | None, predicted: tuple[float, float]) -> dict[str, Any]:
    return {
        "gradients": {"median": gradients},
        "averaging": None if averaging is None else {"median": averaging},
        "predicted": {"gradients": predicted[0], "averaging": predicted[1]},
    }


def row(place: str = "ranks") -> dict[str, Any]:
    contestants = {
        "synchronous": entry(3.0, None, (3.3, 0.0)),
        "allreduce": entry(1.0, 4.0, (1.0, 4.0)),
        "sharded": entry(1.0, 2.0, (0.75, 1.0)),
    }
    return {"set": "edsr", "place": place, "groups": 2, "members": 2, "contestants": contestants}


def test_averaging_is_shared_by_the_steps_of_an_interval() -> None:
    one = per_step(row()["contestants"]["allreduce"], "allreduce", 4)
    assert one == {"gradients": 1.0, "averaging": 1.0, "total": 2.0, "predicted": 2.0}
    plain = per_step(row()["contestants"]["synchronous"], "synchronous", 4)
    assert (plain["total"], plain["predicted"]) == (3.0, 3.3)


def test_errors_are_of_emulated_hosts_alone() -> None:
    assert communication.errors([row("here")]) == {}
    found = communication.errors([row(), row("here"), row("groups")])
    assert found["sharded"] == {"median": pytest.approx(1 / 3), "most": pytest.approx(-1 / 3), "count": 2}
    assert found["synchronous"]["median"] == pytest.approx(0.1)
    met = {one["what"]: one["met"] for one in communication.targets([row()])}
    assert met["edsr, ranks, P=2, K=2: averaging shards over whole models (1/K = 0.5)"]
    assert met["synchronous: median error of the prediction on emulated hosts"]
    assert not met["sharded: median error of the prediction on emulated hosts"]


def test_errors_of_plans_are_by_algorithm() -> None:
    rows = [{"rows": [{"name": "a", "error": e}, {"name": "b", "error": None}]} for e in (0.1, -0.3, 0.2)]
    assert plan.errors(rows) == {"a": {"median": 0.2, "most": -0.3, "count": 3}}


def test_the_sets_have_the_sizes_of_the_papers() -> None:
    assert sum(math.prod(shape) for _, shape in resnet20_shapes()) == 269722
    assert round(sum(math.prod(shape) for _, shape in edsr_shapes()) / 1e6, 1) == 40.7
    assert len({name for name, _ in edsr_shapes()}) == len(edsr_shapes())


@pytest.mark.run_of_a_benchmark
@pytest.mark.usefixtures("launcher")
def test_pytorch_comes_to_the_same(tmp_path: Path, results_of: ResultsOf) -> None:
    assert local_sgd.main(["torch", "--quick", "--results", str(tmp_path)]) == 0
    found = results_of("local_sgd_torch")
    assert found["wrong"] == []
    assert [sorted(row["ratios"]) for row in found["rows"]] == [["allreduce"], ["allreduce", "sharded"]]


@pytest.mark.run_of_a_benchmark
@pytest.mark.usefixtures("emulated_hosts")
def test_communication_and_plans_run_on_hosts(tmp_path: Path, results_of: ResultsOf) -> None:
    assert local_sgd.main(["communication", "--quick", "--mbps", "2000", "--results", str(tmp_path)]) == 0
    found = results_of("local_sgd_communication")
    assert [one["place"] for one in found["rows"]] == ["here", "ranks", "groups"]
    shards, whole = (found["rows"][2]["contestants"][name]["sent"] for name in ("sharded", "allreduce"))
    assert shards == pytest.approx(whole / 2, rel=0.01)
    assert local_sgd.main(["plan", "--quick", "--mbps", "2000", "--parameters", "50k", "--results", str(tmp_path)]) == 0
    assert results_of("local_sgd_plan")["errors"]


@pytest.mark.run_of_a_benchmark
@pytest.mark.usefixtures("emulated_hosts")
@pytest.mark.skipif(not build_info()["ucx"], reason="this build has no UCX")
def test_plans_are_made_over_ucx(tmp_path: Path, results_of: ResultsOf) -> None:
    words = ["--starter", "torchrun", "--quick", "--mbps", "2000", "--parameters", "50k", "--results", str(tmp_path)]
    assert local_sgd.main(["plan", *words]) == 0
    assert results_of("local_sgd_plan_ucx")["errors"]


@pytest.mark.run_of_a_benchmark
@pytest.mark.usefixtures("emulated_hosts")
def test_overlapped_gathers_run_on_hosts(tmp_path: Path, results_of: ResultsOf) -> None:
    assert local_sgd.main(["overlap", "--quick", "--mbps", "2000", "--results", str(tmp_path)]) == 0
    found = results_of("local_sgd_overlap")
    assert found["wrong"] == []
    for row in found["rows"]:
        assert list(row["contestants"]["overlap"]["ratios"]) == ["0", "0.5", "1", "2"]
