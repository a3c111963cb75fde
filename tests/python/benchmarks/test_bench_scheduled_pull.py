"""The wide-area benchmark: results from measurements, and short runs of its parts."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

import scheduled_pull
import sordino.torch as hvd
from claims.scheduled_pull.snapshots import Snapshots
from results import ResultsOf
from sordino import sim
from sordino.errors import SordinoError
from timings.scheduled_pull import one_sided, pulls, pulls_worker, report, serving, serving_worker


def told(step: float, waited: float, *ages: float) -> dict[str, Any]:
    """Return one rank's results of a turn."""
    one: dict[str, Any] = {"right": True, "step": step, "waited": waited, "bytes": 8.0}
    if ages:
        one |= {"ages": list(ages), "seconds": [1.0 for _ in ages], "behind": [2 for _ in ages]}
        one |= {"pulls": 1.0, "failed": 0.0, "messages": 4.0, "unpublished": 0.0}
    return one


def pulls_job() -> dict[str, Any]:
    rounds = {
        "alone": [[told(1.0, 0.0), told(1.0, 0.0)], [told(2.0, 0.0), told(2.0, 0.0)]],
        "none": [[told(1.5, 8.0, 1.1), told(2.5, 12.0, 1.1)], [told(4.0, 10.0, 1.1), told(4.0, 10.0, 1.1)]],
        "naive": [[told(1.0, 0.0, 16.0), told(1.0, 0.0, 18.0)], [told(2.0, 0.0, 17.0), told(2.0, 0.0, 17.0)]],
        "manager": [[told(1.0, 0.0, 1.5), told(1.0, 1.0, 2.5)], [told(2.0, 0.5, 2.0), told(2.2, 0.5, 2.0)]],
        "autonomous": [[told(1.1, 2.0, 16.0), told(1.1, 2.0, 16.0)], [told(2.2, 2.0, 16.0), told(2.2, 2.0, 16.0)]],
    }
    return {"hosts": 2, "ranks_per_host": 1, "ranks": 2, "job_bytes": 1, "rounds": rounds}


def test_steps_are_compared_with_those_of_the_same_round_and_ages_with_what_pulls_take() -> None:
    row = pulls.row_of(pulls_job(), 1, 100)
    found = row["contestants"]
    assert found["none"]["step"]["median"] == 3.0  # between 2 and 4
    assert found["none"]["over_alone"]["median"] == 2.0  # in both rounds
    assert found["none"]["waited"]["median"] == 10.0
    assert found["naive"]["age"] | {"q1": 0, "q3": 0} == {"median": 17.0, "q1": 0, "q3": 0, "least": 16.0, "count": 4}
    assert found["manager"]["beyond"]["median"] == 1.0
    assert found["manager"]["behind"] == {"mean": 2.0, "deviation": 0.0}
    assert "age" not in found["alone"]
    met = {one["what"].split(": ")[1]: one["met"] for one in pulls.targets([row])}
    assert met == {
        "a step of manager, over alone": True,
        "waiting of manager, over that of none": True,
        "age of manager, over that of naive": True,
        "a step of autonomous, over alone": False,
        "waiting of autonomous, over that of none": False,
        "age of autonomous, over that of naive": False,
    }


def test_serving_is_compared_within_rounds_and_a_snapshot_with_the_faster_copy() -> None:
    medians = {"alone": [1.0, 2.0], "neighbour": [1.0, 2.0], "publishing": [1.5, 2.5], "pulled": [1.1, 2.2]}
    ways = {name: {"rounds": values} for name, values in (medians | {"publishing_pulled": [1.5, 5.0]}).items()}
    times = {name: {"median": value} for name, value in (("publish", 1.2), ("torch", 1.0), ("numpy", 2.0))}
    job = {"cores_per_rank": 2, "sizes": [{"bytes": 1 << 20, "ways": ways, "publication": times}]}
    here, across = (serving.rows_of(job, mbps)[0] for mbps in (None, 1000.0))
    assert here["ratios"]["pulled / alone"]["median"] == pytest.approx(1.1)
    assert here["ratios"]["publishing_pulled / publishing"]["median"] == 1.5
    assert here["over_copy"] == 1.2
    assert report.where(across) == "between hosts, 1 Gbps"
    assert [one["met"] for one in serving.targets([here, across])] == [False, False, False]


def test_gets_are_compared_with_the_snapshot_and_late_ones_are_counted() -> None:
    def turn(*seconds: float, late: bool = False) -> dict[str, Any]:
        return {"seconds": list(seconds), "late": late, "pieces": 10.0}

    ways = {
        "nobody": [turn(), turn()],
        "snapshot": [turn(1.0, 2.0), turn(3.0)],
        "get": [turn(70.0, late=True), turn(60.0)],
    }
    job = {"cores_per_rank": 2, "sizes": [{"bytes": 1024, "ways": ways, "right": True}]}
    (row,) = one_sided.rows_of(job, None)
    assert row["ratios"] == {"get": 32.5}
    assert (row["ways"]["get"]["late"], row["ways"]["get"]["turns"]) == (1, 2)
    assert row["ways"]["snapshot"]["seconds"]["count"] == 3
    assert "seconds" not in row["ways"]["nobody"]
    assert [one["met"] for one in one_sided.targets([row])] == [True, None]


# --- The ranks' part, on threads --------------------------------------------------------------------------------------


def test_a_pull_brings_what_was_published() -> None:
    def work() -> None:
        snapshots = Snapshots(4096)
        if hvd.rank() == 0:
            assert snapshots.pull(1) > 0
            snapshots.tell(1, "done")
            assert snapshots.hear() == "good"
        else:
            assert snapshots.hear() == "done"
            snapshots.tell(0, "good")
        assert snapshots.heard() is None
        snapshots.close()

    sim.run(2, work)


def test_a_puller_hears_that_its_peer_is_gone() -> None:
    def work() -> None:
        snapshots = Snapshots(64)
        if hvd.rank() == 1:
            raise ZeroDivisionError
        with pytest.raises(SordinoError):
            snapshots.hear()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        sim.run(2, work)


def test_the_one_that_serves_rules_the_other() -> None:
    chosen = Namespace(sizes=[4096], step_ms=0.5, steps=2, rounds=2, budget=0.01)
    found = sim.run(2, serving_worker.measure, chosen)[0]["sizes"][0]
    assert found["ways"].keys() == serving_worker.WAYS.keys()
    assert all(len(one["rounds"]) == 2 and one["times_a_second"] > 0 for one in found["ways"].values())
    assert found["publication"].keys() == {"publish", "torch", "numpy"}


def test_a_model_of_two_pieces_is_not_right() -> None:
    def work() -> None:
        algorithm = pulls_worker.contestants(2)["naive"]
        training = pulls_worker.Training(algorithm, 4096, 1e-3, 2)
        training.run(3)
        assert training.is_right()
        with torch.no_grad():
            training.parameters[3][5:] *= 0.5
        assert not training.is_right()
        hvd.barrier()

    sim.run(3, work)


@pytest.mark.run_of_a_benchmark
def test_contestants_take_their_turns() -> None:
    chosen = Namespace(model_bytes=8192, compute_ms=1.0, interval=4, warm_up=2, windows=3, rounds=1)
    found = sim.run(3, pulls_worker.measure, chosen)[0]["rounds"]
    assert found.keys() == pulls_worker.contestants(4).keys()
    for name, ((*ranks,),) in found.items():
        assert all(one["right"] and one["step"] >= 1e-3 for one in ranks), name
        assert ("ages" in ranks[0]) == (name in ("none", "naive", "manager", "autonomous"))
        assert all(len(one["ages"]) == len(one["behind"]) == 3 for one in ranks if "ages" in one)


# --- Short runs -------------------------------------------------------------------------------------------------------


@pytest.mark.run_of_a_benchmark
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("emulated_hosts")
def test_pulls_run_on_hosts(tmp_path: Path, results_of: ResultsOf) -> None:
    assert scheduled_pull.main(["pulls", "--quick", "--results", str(tmp_path)]) == 0
    found = results_of("scheduled_pull_pulls_quick")
    assert found["wrong"] == []
    (row,) = found["rows"]
    assert (row["wide"], row["ranks"]) == (1, 2)
    entries = row["contestants"]
    assert entries["naive"]["age"]["median"] > entries["none"]["age"]["median"]
    assert all(entries[name]["messages"] > 0 for name in ("manager", "autonomous"))
    assert all(entries[name]["messages"] == 0 for name in ("none", "naive"))
    assert entries["none"]["bytes"]["median"] == pytest.approx(1 << 20, rel=0.3)


@pytest.mark.run_of_a_benchmark
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("launcher")
def test_serving_runs(tmp_path: Path, results_of: ResultsOf) -> None:
    assert scheduled_pull.main(["serving", "--quick", "--results", str(tmp_path)]) == 0
    (row,) = results_of("scheduled_pull_serving")["rows"]
    assert all(one["median"] > 0 for one in row["ratios"].values())
    assert row["ways"]["pulled"]["times_a_second"] > 1
    assert row["over_copy"] > 0


@pytest.mark.run_of_a_benchmark
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("emulated_hosts")
def test_one_sided_runs_on_hosts(tmp_path: Path, results_of: ResultsOf) -> None:
    pytest.importorskip("mpi4py")
    assert scheduled_pull.main(["one_sided", "--quick", "--results", str(tmp_path)]) == 0
    found = results_of("scheduled_pull_one_sided")
    assert found["wrong"] == []
    (row,) = found["rows"]
    assert row["ways"]["snapshot"]["late"] == 0
    assert row["ways"]["snapshot"]["seconds"]["count"] > 1
    assert row["ways"]["nobody"]["computed"]["median"] > 0
