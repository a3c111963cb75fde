"""Claims of local SGD: their verdicts, and the results of their trainings and cost models."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from claims.evidence import FAILS, HOLDS
from claims.local_sgd import figure_2, models, scaling, study, timed, times, workers
from claims.local_sgd.problems import EDSR, problem_of
from claims.local_sgd.timed import NAMES
from claims.local_sgd.worker import SETS
from sordino.data import FASHION_MNIST_DIR
from sordino.plan import Line, Rates

STUDY = replace(study.classification(True), counts=(1, 2, 4, 8), seeds=2, bears=2, drops={2: 0.1, 4: 1.0, 8: 4.0})


def trained(tests: dict[int, list[float]], collapsed: tuple[tuple[int, int], ...] = ()) -> study.Trained:
    """Return results of the trainings of STUDY, in which the distance D is P / 10 up to P = 4, and 0.5 at P = 8."""
    return {
        (count, seed): {
            "test": value,
            "losses": [1.0, 0.1 * count],
            "curve": [value],
            "distances": [9.0] + [min(count / 10, 0.5)] * 9,
            "collapsed": (count, seed) in collapsed,
        }
        for count, values in tests.items()
        for seed, value in enumerate(values, start=1)
    }


FOUND = {1: [90.0, 91.0], 2: [89.9, 90.8], 4: [89.0, 89.9], 8: [80.0, 81.1]}


def test_accuracy_is_judged_by_what_each_number_loses() -> None:
    found = trained(FOUND)
    evidence = study.accuracy(STUDY, found)
    assert [one.verdict for one in evidence] == [HOLDS] * 4 + [HOLDS]
    assert evidence[0].ours == pytest.approx(9.95) and evidence[0].source == 4.0
    assert evidence[-1].ours == 2 == study.borne(STUDY, found)
    assert study.borne(STUDY, trained(FOUND, collapsed=((2, 1),))) == 1


def test_a_collapse_is_counted_and_not_averaged_in() -> None:
    found = trained(FOUND | {8: [10.0, 81.1]}, collapsed=((8, 1),))
    headline = study.accuracy(STUDY, found)[0]
    assert (headline.ours, headline.count, headline.collapsed) == (pytest.approx(9.9), 1, 1)
    assert study.tests(STUDY, found)["8"] == [81.1]


def test_distances_are_judged_by_doublings_after_the_warm_up() -> None:
    by_doubling = {one.what.partition(",")[0]: one for one in study.distances(STUDY, trained(FOUND), {4: 1.15})}
    assert by_doubling["D at P = 8 over D at P = 4"].ours == pytest.approx(0.625)
    assert by_doubling["D at P = 8 over D at P = 4"].verdict == HOLDS  # less than in proportion
    assert (
        by_doubling["D at P = 4 over D at P = 2"].verdict == FAILS
        and by_doubling["D at P = 4 over D at P = 2"].source == 1.15
    )


def test_learning_is_judged_at_equal_epochs_and_at_equal_steps() -> None:
    short = {(count, seed): {**one, "test": 89.5} for (count, seed), one in trained(FOUND).items() if count > 1}
    evidence = {one.what: one for one in study.learning(STUDY, trained(FOUND), short)}
    assert evidence["equal epochs: training loss of the last one, P = 8 above P = 1"].ours == pytest.approx(0.7)
    assert evidence["equal steps: P = 8 above P = 1, points"].ours == pytest.approx(-8.95)


def test_the_rule_is_judged_by_what_accuracy_bears() -> None:
    tried = [{"chosen": 4}, {"chosen": 4}]
    evidence = workers.judge(STUDY, trained(FOUND), tried, 1)
    assert [one.ours for one in evidence[:2]] == [1.0, 1.0]  # one doubling more than P = 2, by both ways
    assert [one.verdict for one in evidence[:2]] == [FAILS, FAILS]
    assert workers.by_whole_training(STUDY, trained(FOUND, collapsed=((4, 2),))) == [4, 2]


def test_independent_noise_is_the_distance_of_random_vectors() -> None:
    torch.manual_seed(0)
    values = {count: torch.randn(count, 100_000) for count in (2, 8)}
    found = {count: float((one - one.mean(0)).norm(dim=1).mean()) for count, one in values.items()}
    assert found[8] / found[2] == pytest.approx(figure_2.by_chance(2, 8), rel=0.01)


def test_the_rate_is_the_largest_that_all_bear_and_not_above_the_best() -> None:
    one = replace(STUDY, rates=(0.1, 0.2, 0.4, 0.8))
    plan = one.tuned()
    wanted = next(plan)
    assert len(wanted) == 8  # P = 1, every rate, two seeds
    wanted = plan.send([{"curve": [value]} for value in (1, 1, 2, 2, 5, 4, 3, 3)])
    assert [(run.settings["models"], run.settings["lr"]) for run in wanted] == [(8, 0.4)] * 2
    wanted = plan.send([{"collapsed": False}, {"collapsed": True}])
    assert [run.settings["lr"] for run in wanted] == [0.2] * 2
    with pytest.raises(StopIteration) as end:
        plan.send([{"collapsed": False}] * 2)
    study_found, best = end.value.value
    assert (study_found.task["lr"], best) == (0.2, 0.4)


# --- Trainings --------------------------------------------------------------------------------------------------------


def small(**other: Any) -> dict[str, Any]:
    task = study.classification(True).task | {"epochs": 2, "images": 256, "lr": 0.05}
    return models.Local(**{**task, "models": 2, "seed": 1, **other}).run.settings


def test_a_training_is_the_same_whenever_it_is_made() -> None:
    one, two = models.train(**small()), models.train(**small())
    assert one == two and not one["collapsed"] and len(one["curve"]) == 2
    assert len(one["distances"]) == 1 and 0 < one["distances"][0] < 1  # 8 steps, one averaging


def test_one_model_at_twice_the_batch_is_two_that_are_averaged_in_every_step() -> None:
    one = models.train(**small(models=1, batch=64, lr=0.1, rule="none"))
    two = models.train(**small(models=2, batch=32, lr=0.1, rule="none", interval=1))
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-3)


def test_what_diverges_has_collapsed() -> None:
    found = models.train(**small(lr=1e30))
    assert found["collapsed"] and found["losses"][-1] is None
    assert models.settled([0.1, None]) is None and models.settled([9.0] + [0.2] * 9) == pytest.approx(0.2)


def test_the_small_edsr_doubles_the_resolution_and_learns() -> None:
    assert EDSR()(torch.zeros(2, 1, 7, 7)).shape == (2, 1, 14, 14)
    assert sum(one.numel() for one in EDSR().parameters()) == 21_185
    task = study.resolution(True).task | {"epochs": 4, "images": 256, "lr": 0.001}
    found = models.train(**models.Local(**{**task, "models": 1, "seed": 1}).run.settings)
    assert found["losses"][-1] < 0.7 * found["losses"][0] and found["curve"][-1] > found["curve"][0]


@pytest.mark.extra
@pytest.mark.skipif(not FASHION_MNIST_DIR.is_dir(), reason="needs `apt-get install dataset-fashion-mnist`")
def test_patches_are_cut_alike_from_both_resolutions() -> None:
    class Shifted(torch.nn.Module):
        def __init__(self, pixels: int) -> None:
            super().__init__()
            self._pixels = pixels

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            larger = torch.nn.functional.interpolate(images, scale_factor=2.0, mode="bilinear")
            return larger.roll((self._pixels, self._pixels), (2, 3))

    problem, rows = problem_of("resolution", "fashion-mnist", 64, 16), torch.arange(64)
    for draw in range(8):
        in_place = float(problem.loss(Shifted(0), rows, draw))
        assert all(in_place < float(problem.loss(Shifted(pixels), rows, draw)) for pixels in (-2, 2))


# --- Timing -----------------------------------------------------------------------------------------------------------


def test_averaging_is_shared_by_the_steps_of_an_interval() -> None:
    found = {
        "gradients": {"synchronous": [4.0, 4.2], "allreduce": [1.0, 1.0], "sharded": [1.0, 1.0]},
        "averaging": {"synchronous": [0.0, 0.0], "allreduce": [8.0, 8.0], "sharded": [4.0, 4.4]},
        "predicted": {"sharded": {"gradients": 1.0, "averaging": 4.0}},
    }
    one = timed.Communication("resnet20", 8, ((4, 2),), 500.0, 2, 1, 1.0)
    assert one.totals(found, "sharded") == [1.5, 1.55]
    evidence = timed.judge(one, [found])
    assert [item.verdict for item in evidence] == [HOLDS] * 4
    assert evidence[0].ours == pytest.approx(0.525) and evidence[-1].ours == pytest.approx(-0.016, abs=1e-3)


def test_the_networks_that_are_timed_are_those_whose_parameters_are_sent() -> None:
    count = sum(one.numel() for one in scaling.ResNet20().parameters())
    assert count == sum(math.prod(shape) for _, shape in SETS["resnet20"]())
    assert 34 < scaling.NETWORKS["edsr"]()[1] < 35


def test_speedups_are_linear_where_links_cost_nothing_and_flat_where_they_cost_all() -> None:
    one, line = times.FIGURE_5_SCALING, {"step": 0.0, "image": 0.01}
    free = one.speedups(Rates(None, Line(0.0, 0.0), 0.0), line)
    assert all(values == pytest.approx(list(scaling.COUNTS)) for values in free.values())
    dear = one.speedups(Rates(None, Line(1e-3, 1e-7), 1e-4, 1e-3), line)
    assert dear["sharded"][-1] > dear["allreduce"][-1] > dear["synchronous"][-1]
    assert [item.verdict for item in scaling.judge(one, dear)][:2] == [HOLDS] * 2


@pytest.mark.parametrize("way", NAMES)
def test_where_nothing_hides_it_slower_communication_takes_as_many_times_as_long(way: str) -> None:
    one, rates = times.FIGURE_5_SCALING, Rates(None, Line(1e-2, 1e-7), 1e-4, 1e-3, 1e-4)
    nothing = {"step": 0.0, "image": 0.0}
    usual, slowed = (one._seconds(way, 8, scaling.slower(rates, factor), nothing) for factor in (1.0, 3.0))
    assert slowed == pytest.approx(3 * usual)


@pytest.mark.parametrize("one", [times.FIGURE_5_SCALING, times.FIGURE_9_SCALING])
def test_communication_takes_as_long_as_it_must_for_synchronous_sgd_to_flatten_where_the_sources_does(
    one: scaling.Scaling,
) -> None:
    line, rates = {"step": 0.0, "image": 0.01}, Rates(None, Line(1e-4, 1e-9), 1e-4, 1e-5, 1e-6)
    _, shapes = one.found(rates, line)
    assert scaling.gain(shapes["speedups"], "synchronous", one.flat) == pytest.approx(scaling.FLAT)
    _, twice = one.found(scaling.slower(rates, 2.0), line)
    assert twice["slower"] == pytest.approx(shapes["slower"] / 2)
    assert twice["speedups"]["sharded"] == pytest.approx(shapes["speedups"]["sharded"])
