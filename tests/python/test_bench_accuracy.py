"""The accuracy benchmark: what it plans, how it judges, that an interruption loses nothing, and a short run."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

import accuracy
import report
from accuracy import FULL, QUICK, Plan, run_all
from claims.accuracy.claims import METHODS, judge, points
from claims.accuracy.training import Task, Training, load, train
from sordino.errors import UsageError
from sordino.report import records

TINY = Task("digits", images=256, held_out=64, epochs=1)


def run(validation: float, test: float, lr: float, seed: int = 1, **others: Any) -> dict[str, Any]:
    """One training's results."""
    place = {"algorithm": "sgp", "workers": 2, "batch": 64, "lr": lr, "seed": seed}
    return {**place, "validation": validation, "test": test, "consensus_distance": [0.5], **others}


def point(mean: float, std: float | None = 0.003) -> dict[str, Any]:
    return {"mean": mean, "std": std}


# --- What is planned --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [FULL, QUICK])
def test_a_plan_trains_every_point_of_both_figures_once(plan: Plan) -> None:
    trainings = plan.trainings()
    assert len({one.key for one in trainings}) == len(trainings) == len(set(trainings))
    places = {(one.workers, one.batch) for one in trainings}
    assert places == {(plan.batch_workers, batch) for batch in plan.batches} | {
        (workers, plan.worker_batch) for workers in plan.workers
    }
    assert len(trainings) == len(places) * len(METHODS) * len(plan.rates) * plan.seeds
    assert all(one.batch % one.workers == 0 and one.steps(plan.task) > 0 for one in trainings)


def test_images_held_out_are_not_trained_on() -> None:
    data = load("digits", None, 1024, 256)
    shown = {image.numpy().tobytes() for image in data["train"][0]}
    assert len(data["train"][1]) == 1024 and len(data["validation"][1]) == 256
    for part in ("validation", "test"):
        assert not any(image.numpy().tobytes() in shown for image in data[part][0])


# --- Trainings --------------------------------------------------------------------------------------------------------


@pytest.mark.run_of_a_benchmark
def test_what_averages_everything_trains_the_same_model() -> None:
    base = train(TINY, Training("allreduce", 1, 32, 0.1, seed=1))
    assert base["consensus_distance"] == [0.0] and base["steps"] == 8
    for name in METHODS:
        found = train(TINY, Training(name, 2, 32, 0.1, seed=1))
        assert found["test"] == pytest.approx(base["test"], abs=0.01)
        assert found["consensus_distance"][0] < 1e-6


@pytest.mark.parametrize("name", ["sgp", "crossover", "hierarchical"])
def test_workers_of_gossip_differ(name: str) -> None:
    assert train(TINY, Training(name, 8, 32, 0.1, seed=1))["consensus_distance"][0] > 1e-4


def test_a_training_that_diverges_says_so() -> None:
    found = train(TINY, Training("crossover", 4, 32, 1e30, seed=1))
    assert found["consensus_distance"] == [None] and 0 <= found["test"] <= 1
    assert points([{**found, "seed": 2}, found])[0]["consensus_distance"] is None


# --- What is made of them ---------------------------------------------------------------------------------------------


def test_learning_rates_are_chosen_by_validation_alone() -> None:
    runs = [run(0.8, 0.9, 1.0), run(0.9, 0.7, 2.0), run(0.7, 0.9, 4.0), run(0.8, 0.9, 1.0, 2), run(0.9, 0.8, 2.0, 2)]
    [found] = points(runs)
    assert (found["lr"], found["mean"], found["test"]) == (2.0, pytest.approx(0.75), [0.7, 0.8])
    assert found["std"] == pytest.approx(0.0707, abs=1e-4) and not found["at_the_edge"]
    assert found["validation_by_rate"] == {"1": 0.8, "2": 0.9, "4": 0.7} and found["test_by_rate"]["2"] == found["mean"]
    assert found["over_rates"]["test"] == [pytest.approx(2.5 / 3), pytest.approx(0.85)]
    assert points(runs[:2])[0]["at_the_edge"] and points(runs[:1])[0]["std"] is None


def test_a_claim_holds_only_beyond_the_spread() -> None:
    def verdict(left: float, right: float, **options: Any) -> str:
        found = judge(7, "it", [point(left)], [point(right, 0.004)], **options)
        assert found["spread"] == pytest.approx(0.005)
        return str(found["verdict"])

    assert [verdict(0.9, other) for other in (0.89, 0.896, 0.904, 0.91)] == [
        "holds", "within the spread", "within the spread", "does not hold",
    ]  # fmt: skip
    assert [verdict(0.9, other, alike=True) for other in (0.89, 0.896, 0.904, 0.91)] == [
        "does not hold", "holds", "holds", "does not hold",
    ]  # fmt: skip
    assert judge(7, "it", [point(0.9, None)], [point(0.8)])["verdict"] == "not judged"


# --- Runs -------------------------------------------------------------------------------------------------------------


@pytest.mark.run_of_a_benchmark
def test_an_interrupted_benchmark_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = Plan(TINY, (32,), 2, (2,), 32, (0.1,), seeds=1)
    kept, stale, *_ = plan.trainings()
    for one, task in ((kept, asdict(TINY)), (stale, {**asdict(TINY), "epochs": 9})):
        records.write({"name": one.key, "task": task, "run": {**asdict(one), "test": -1.0}}, tmp_path)
    runs = run_all(plan, tmp_path, 1, None)
    assert "1 of 4 trainings are done already" in capsys.readouterr().err
    assert [found["algorithm"] for found in runs] == list(METHODS)
    assert runs[0]["test"] == -1.0 and all(found["test"] >= 0 for found in runs[1:])
    assert sorted(path.stem for path in tmp_path.iterdir()) == sorted(one.key for one in plan.trainings())
    assert json.loads((tmp_path / f"{stale.key}.json").read_text())["run"] == runs[1]


def test_what_fails_in_a_training_ends_the_benchmark(tmp_path: Path) -> None:
    task = Task("fashion-mnist", images=256, held_out=64, epochs=1)
    with pytest.raises(UsageError, match="no such folder"):
        run_all(Plan(task, (32,), 2, (2,), 32, (0.1,), seeds=3), tmp_path, 1, str(tmp_path / "nowhere"))
    assert not list(tmp_path.iterdir())


@pytest.mark.run_of_a_benchmark
def test_accuracy_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert accuracy.main(["--quick", "--results", str(tmp_path)]) == 0
    output = capsys.readouterr()
    assert "## Test accuracy in percent, 4 workers" in output.out and "[12/12] " in output.err
    found = json.loads((tmp_path / "accuracy.json").read_text())
    assert len(found["runs"]) == len(found["points"]) == 12
    assert all(one["test"] > 0.5 for one in found["runs"])
    assert {one["verdict"] for one in found["claims"]} == {"not judged"}
    assert sorted(path.suffix for path in tmp_path.iterdir()) in ([".json", ".md"], [".json", ".md", ".png"])
    assert report.main([str(tmp_path / "accuracy.json")]) == 0
    assert torch.get_num_threads() == 1
