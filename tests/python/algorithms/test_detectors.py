"""Detectors of parameter skipping, and its statistics, in a world of one rank, against a comparison of every
element."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sordino.torch as hvd
from sordino.algorithms import CaPS
from sordino.algorithms.caps.counting import Detector
from sordino.algorithms.caps.detectors import detector_of
from sordino.algorithms.caps.items import Items
from sordino.algorithms.caps.statistics import CaPSStatistics
from sordino.errors import UsageError
from sordino.runtime.context import current
from sordino.runtime.exchange.flat_buffer import ParameterBuffer

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


class Bench:
    """Some tensors and a detector for them."""

    def __init__(self, tensors: list[torch.Tensor], **settings: Any) -> None:
        self.tensors = tensors
        algorithm = CaPS(**settings)
        self.arena = ParameterBuffer(current(), [f"t{k}" for k in range(len(tensors))], tensors, "model")
        self.items = Items.of(self.arena, algorithm.block_bytes if algorithm.granularity == "block" else None)
        self.detector: Detector = detector_of(self.arena, self.items, algorithm)
        self.detector.begin(0)
        self.turn = 0

    def ratios(self) -> list[float]:
        """Return the detector's ratios after the tensors have changed; then all tensors are sent."""
        self.detector.count(self.turn)
        found = (self.detector.counts.double() / self.detector.compared).tolist()
        self.detector.keep(self.turn, self.items.parts(np.ones(len(self.items), dtype=bool)))
        self.turn += 1
        return found


def mixed() -> list[torch.Tensor]:
    """Return tensors in the order of an arena: by dtype."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(101 + 7 * k, generator=generator).to(dtype) for k, dtype in enumerate(FLOATS)]


@pytest.mark.parametrize("digits", [None, 2])
def test_naive_ratios_are_those_of_comparing(digits: int | None) -> None:
    bench = Bench(mixed(), digits=digits)
    generator = torch.Generator().manual_seed(2)
    for _ in range(4):
        before = [tensor.clone() for tensor in bench.tensors]
        for tensor in bench.tensors:
            moved = torch.rand(tensor.shape, generator=generator) < 0.5
            tensor += (moved * torch.rand(tensor.shape, generator=generator) * 0.02).to(tensor.dtype)
        wanted = []
        for tensor, old in zip(bench.tensors, before):
            if digits is None:
                wanted.append(float((tensor == old).double().mean()))
            else:
                wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
                one, other = (np.rint(value.to(wide).numpy() * wide_number(wide, 100)) for value in (tensor, old))
                wanted.append(float((one == other).mean()))
        assert bench.ratios() == pytest.approx(wanted)


def wide_number(dtype: torch.dtype, value: float) -> Any:
    return np.float64(value) if dtype == torch.float64 else np.float32(value)


def test_nan_is_itself_and_zeros_have_signs() -> None:
    bench = Bench([torch.tensor([math.nan, 0.0, -0.0, math.inf])])
    assert bench.ratios() == [1]
    bench.tensors[0][1:3] *= -1
    assert bench.ratios() == [0.5]


def test_random_samples_estimate_without_bias() -> None:
    """The mean and the spread over many steps of a known pattern are right."""
    still = torch.rand(20_000, generator=torch.Generator().manual_seed(3)) < 0.3
    bench = Bench([torch.zeros(20_000)], detector="random", sample_ratio=0.01, seed=5)
    ratios, errors = [], []
    for _ in range(400):
        bench.tensors[0] += (~still).float()
        ratios += bench.ratios()
        (error,) = bench.detector.standard_errors().tolist()  # type: ignore[union-attr]
        errors.append(error)
    truth = float(still.double().mean())
    stated = math.sqrt(truth * (1 - truth) / 200)
    assert np.mean(ratios) == pytest.approx(truth, abs=4 * stated / math.sqrt(400))
    assert 0.8 * stated < np.std(ratios) < 1.1 * stated
    assert np.mean(errors) == pytest.approx(stated, rel=0.05)
    assert len(set(ratios)) > 10


def test_small_tensors_have_a_sample() -> None:
    bench = Bench([torch.zeros(1), torch.zeros(0), torch.zeros(3)], detector="random", sample_ratio=0.01)
    assert bench.detector.compared.tolist() == [1, 0, 3]  # all elements, until a count exists
    bench.tensors[0] += 1
    bench.ratios()
    assert bench.detector.compared.tolist() == [1, 0, 1]
    assert bench.detector.counts.tolist()[:2] == [0, 0] and bench.detector.counts.tolist()[2] == 1


def test_history_finds_what_moves() -> None:
    """Once a moving region of the sample's size is known, only its elements are compared, also if the region moves."""
    bench = Bench([torch.zeros(1000)], detector="history", sample_ratio=0.05, survey_interval=3)
    tensor = bench.tensors[0]
    tensor[200:250] += 1
    assert bench.ratios() == [0.95]  # the first time all are compared
    for _ in range(5):
        tensor[200:250] += 1
        assert bench.ratios() == [0]
    for turn in range(4):
        tensor[200:225] += 1
        assert bench.ratios() == [0.5], turn
    for _ in range(40):
        tensor[600:650] += 1
        last = bench.ratios()
    assert last == [0]


def test_history_finds_what_moves_after_a_long_time() -> None:
    """Counters are bytes. However long all elements have moved, an element that moves afterwards comes to the front."""
    bench = Bench([torch.zeros(100)], detector="history", sample_ratio=0.1, survey_interval=1)
    for _ in range(600):
        bench.tensors[0] += 1
        assert bench.ratios()[0] == 0
    for _ in range(300):
        bench.tensors[0][60:90] += 1
        last = bench.ratios()
    assert last == [0]


def test_history_counts_after_a_restart_at_any_step() -> None:
    bench = Bench([torch.zeros(100)], detector="history", sample_ratio=0.1, survey_interval=7)
    bench.turn = 4
    for expected in (0.9, 0, 0):
        bench.tensors[0][30:40] += 1
        assert bench.ratios() == [expected]


def moved(bench: Bench, *steps: float) -> list[float]:
    for tensor, one in zip(bench.tensors, steps):
        tensor += one
    return bench.ratios()


def test_movement_ranks_by_how_far_elements_move() -> None:
    bench = Bench([torch.zeros(30), torch.zeros(50), torch.zeros(20), torch.zeros(0)], detector="movement", memory=0.5)
    assert moved(bench, 1.0, -2.0, 0.0) == [0.5, 0, 1, 1]  # a tensor that has never moved is below all others
    assert moved(bench, 1.0, 1.0, 1.0) == [0.5, 0, 0.8, 1]  # the averages are 0.75, 1 and 0.5
    bench.tensors[2][0] = math.nan
    assert moved(bench, 1.0, 1.0) == [0.7, 0.2, 0, 1]


@pytest.mark.parametrize("memory", [0.0, 0.5])
def test_movement_is_infinite_only_while_values_are(memory: float) -> None:
    bench = Bench([torch.zeros(30), torch.zeros(70)], detector="movement", memory=memory)
    assert moved(bench, 1.0, 2.0) == [0.7, 0]
    bench.tensors[0][3] = math.nan
    assert moved(bench, 1.0, 2.0) == [0, 0.3]
    assert moved(bench, 1.0, 2.0) == [0, 0.3]  # NaN plus one is NaN
    bench.tensors[0][3] = 3.0
    assert moved(bench, 0.0, 2.0) == [0, 0.3]  # the distance from NaN is NaN, too
    assert moved(bench, 1.0, 2.0) == [0.7, 0]


def test_what_moves_alike_is_sent_alike() -> None:
    bench = Bench(mixed(), detector="movement")
    assert moved(bench, *[0.0] * 4) == [1] * 4
    bench = Bench([torch.zeros(16), torch.zeros(64)], detector="movement")
    assert moved(bench, 0.25, 0.25) == [0, 0]  # movements are per element, for any number of elements


def test_movement_goes_on_where_its_state_was_kept() -> None:
    one, other = (Bench([torch.zeros(8), torch.zeros(8)], detector="movement") for _ in range(2))
    moved(one, 1.0, 0.5)
    state = one.detector.state()
    other.detector.load_state(state)
    moved(one, 0.0, 0.4)
    assert not torch.equal(one.detector.state()["averages"], state["averages"])
    moved(other, 0.0, 0.4)
    torch.testing.assert_close(one.detector.state()["averages"], other.detector.state()["averages"])


def test_movement_does_not_round() -> None:
    with pytest.raises(UsageError, match=r"digits.*has no effect with detector='movement'"):
        CaPS("movement", digits=3)


def test_blocks_are_items() -> None:
    bench = Bench([torch.zeros(40), torch.zeros(16)], granularity="block", block_bytes=64)
    assert bench.items.bytes.tolist() == [64, 64, 32, 64]
    assert bench.items.tensors.tolist() == [0, 0, 0, 1]
    bench.tensors[0][17] = 1
    assert bench.ratios() == [1, 15 / 16, 1, 1]


# ---- statistics ----------------------------------------------------------------------------------------------------


def noted(bench: Bench, interval: int = 2) -> CaPSStatistics:
    statistics = CaPSStatistics(interval)
    statistics.describe(bench.arena.names, bench.items, 0)
    for step in range(1, 6):
        bench.tensors[0][: 4 * step] += 1
        bench.ratios()
        skipped = torch.tensor([False, step % 2 == 0])
        statistics.add(step, 10.0 + step, bench.detector, skipped)
    statistics.end_epoch(5, 15.0, 0.25)
    return statistics


class Log:
    """Stand-in for TensorBoard's writer."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.scalars.append((tag, scalar_value, global_step))


def test_points_sum_up_steps(tmp_path: Path) -> None:
    statistics = noted(Bench([torch.zeros(40), torch.zeros(10)]))
    first, second, last = statistics.points
    assert (first.step, first.steps, first.threshold, first.metric) == (2, 2, 12, None)
    assert first.ratios == pytest.approx([(36 + 32) / 80, 1]) and first.skipped == [0, 0.5]
    assert (first.bytes_sent, first.bytes_unskipped) == (160 + 200, 400)
    assert second.ratios == pytest.approx([(28 + 24) / 80, 1])
    assert (last.step, last.steps, last.metric, last.bytes_sent) == (5, 1, 0.25, 200)
    assert first.errors is None
    statistics.save(tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["tensors"] == [{"name": "t0", "bytes": 160}, {"name": "t1", "bytes": 40}]
    assert (found["bytes_sent"], found["bytes_unskipped"], len(found["points"])) == (920, 1000, 3)
    statistics.plot(tmp_path / "found.png")
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")


def test_tensorboard_is_told_old_and_new_points() -> None:
    bench, log = Bench([torch.zeros(40), torch.zeros(10)]), Log()
    statistics = noted(bench)
    statistics.write_to(log)
    assert ("sordino/unchanged/t0", pytest.approx(0.85), 2) in log.scalars
    assert ("sordino/skipped/t1", 0.5, 2) in log.scalars
    assert ("sordino/metric", 0.25, 5) in log.scalars and ("sordino/bytes sent", 200, 5) in log.scalars
    before = len(log.scalars)
    statistics.add(6, 9.0, bench.detector, torch.tensor([True, True]))
    assert ("sordino/threshold", 9.0, 6) in log.scalars[before:]


def test_random_points_have_errors() -> None:
    bench = Bench([torch.zeros(400), torch.zeros(100)], detector="random", sample_ratio=0.1)
    for point in noted(bench).points:
        assert point.errors is not None and len(point.errors) == 2
        assert all(error is not None and 0 <= error < 0.1 for error in point.errors)
        assert point.errors[0] != 0  # some of the elements move


@pytest.mark.parametrize("samples", [2, 5, 40, 100])
def test_small_samples_state_their_errors(samples: int) -> None:
    """Averaged over many draws, the stated variance is that of the estimates, apart from the gain by stratification."""
    bench = Bench([torch.zeros(100)], detector="random", sample_ratio=samples / 100)
    moves = (torch.rand(100, generator=torch.Generator().manual_seed(8)) < 0.5).float()
    ratios, variances = [], []
    for _ in range(1500):
        bench.tensors[0] += moves
        ratios += bench.ratios()
        (error,) = bench.detector.standard_errors().tolist()  # type: ignore[union-attr]
        variances.append(error**2)
    if samples == 100:
        assert len(set(ratios)) == 1 and max(variances) == 0
    else:
        assert 0.6 < np.var(ratios) / np.mean(variances) < 1.2
    assert np.mean(ratios) == pytest.approx(1 - moves.mean().item(), abs=0.03)


def test_a_single_sample_tells_no_error(tmp_path: Path) -> None:
    bench = Bench([torch.zeros(40), torch.zeros(10)], detector="random")
    statistics = noted(bench)
    assert all(math.isnan(error) for error in statistics.points[0].errors or ())
    statistics.end_epoch(6, math.inf, math.nan)
    statistics.save(tmp_path / "found.json")

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is not JSON")

    points = json.loads((tmp_path / "found.json").read_text(), parse_constant=refuse)["points"]
    assert points[0]["errors"] == [None, None]
    assert (points[-1]["threshold"], points[-1]["metric"]) == (None, None)
    statistics.plot(tmp_path / "found.png")


def test_any_seed_draws() -> None:
    drawn = [Bench([torch.zeros(1000)], detector="random", seed=seed).detector for seed in (0, 1, 2**40, 2**64 - 1)]
    assert len({tuple(one._indices.tolist()) for one in drawn}) == 4  # type: ignore[attr-defined]


def test_one_rank_alone_skips_nothing() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), [("p", parameter)], algorithm="caps")
    parameter.grad = torch.ones(3)
    optimizer.step()
    assert parameter.tolist() == [0, 0, 0]
    optimizer.report_metric(2.0)
    optimizer.flush()
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    assert state["sordino"]["threshold"] == 10
    assert [point.metric for point in optimizer.statistics.points] == [2.0]
    assert optimizer.statistics.bytes_unskipped == 0
    assert [point.step for point in optimizer.statistics.points] == [1]
