"""The gossip benchmark: Algorithm 2 as in the paper, counts that must be exact, verdicts, short runs."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import gossip
import sordino.torch as hvd
from claims.gossip import figure_9_worker
from cluster import jobs
from results import ResultsOf
from sordino._core import RandomCycle, RandomPull
from sordino.timing import Participants
from timings.gossip import exchange, topology
from timings.gossip.topology import SEGMENTS, TooSlow, algorithm_2, copies, dead_end_probability

EXCHANGE = [str(Path(gossip.__file__)), "exchange"]

# --- Finding peers ----------------------------------------------------------------------------------------------------


def test_algorithm_2_draws_destinations_that_are_all_different_and_none_is_the_worker_itself() -> None:
    generator = np.random.default_rng(1)
    drawn = [algorithm_2(6, generator, math.inf) for _ in range(2000)]
    for destinations in drawn:
        assert destinations == [] or sorted(destinations) == list(range(6))
        assert all(worker != destination for worker, destination in enumerate(destinations))
    first = [destinations[0] for destinations in drawn if destinations]
    assert set(first) == {1, 2, 3, 4, 5}
    share = sum(not destinations for destinations in drawn) / len(drawn)
    assert share == pytest.approx(dead_end_probability(6), abs=4 * math.sqrt(0.1 / len(drawn)))


def dead_ends(size: int, taken: tuple[int, ...] = ()) -> float:
    """Return the probability of a dead end, by trying every sequence of draws."""
    left = [rank for rank in range(size) if rank not in (*taken, len(taken))]
    if len(taken) == size or not left:
        return float(len(taken) < size)
    return sum(dead_ends(size, (*taken, rank)) for rank in left) / len(left)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7])
def test_the_probability_of_a_dead_end_is_that_of_all_ways(size: int) -> None:
    assert dead_end_probability(size) == pytest.approx(dead_ends(size), abs=1e-12)


def test_a_draw_stops_at_its_deadline() -> None:
    with pytest.raises(TooSlow):
        algorithm_2(1000, np.random.default_rng(1), time.perf_counter() - 1)
    assert topology.measure_source(3000, budget=0.01, limit=0.01) == {"over": 0.01}


def test_copies_are_counted() -> None:
    assert set(copies(RandomCycle(33, 1), 4).values()) == {1.0}
    combo = copies(RandomPull(33, 1, SEGMENTS, 1), 4)
    assert combo["mean"] == 1  # every rank pulls one copy, so that is the mean number sent
    assert 1 < combo["model_busiest"] <= combo["model_worst"] < combo["segment_busiest"] <= combo["segment_worst"]


# --- One exchange -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("after", "right"), [(2.5, True), (1.0, False), (3.0, False)])
def test_a_check_wants_values_to_move_and_their_sum_to_stay(
    monkeypatch: pytest.MonkeyPatch, after: float, right: bool
) -> None:
    monkeypatch.setattr(Participants, "maximum", lambda self, values: values)
    monkeypatch.setattr(hvd, "allreduce", lambda tensor, **_: 2 * tensor)  # as if both ranks had the same values
    tensor = torch.zeros(5)  # the ranks begin with 1 and 4
    contestant = exchange.Contestant([tensor], lambda: tensor.fill_(after))
    assert contestant.is_right(Participants(0, 2)) is right


def test_groups_of_two_take_part_where_they_are_not_everybody() -> None:
    having = [size for size in range(2, 9) if "hierarchical" in exchange.algorithms(size)]
    assert having == [4, 6, 8]


# --- Slow links -------------------------------------------------------------------------------------------------------


def test_a_quarter_of_the_channels_is_a_sixteenth_of_the_parameters() -> None:
    shapes = figure_9_worker.narrow_resnet50()
    assert len({name for name, _ in shapes}) == 161
    assert sum(math.prod(shape) for _, shape in shapes) / 25_557_032 == pytest.approx(1 / 16, abs=0.01)


# --- Short runs -------------------------------------------------------------------------------------------------------


def run(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command, environment = [sys.executable, *words], {**os.environ, **(env or {})}
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)


@pytest.mark.run_of_a_benchmark
def test_topology_runs(tmp_path: Path, results_of: ResultsOf) -> None:
    assert gossip.main(["topology", "--quick", "--sizes", "8,64", "--results", str(tmp_path)]) == 0
    found = results_of("gossip_topology")
    assert [row["workers"] for row in found["rows"]] == [8, 64]
    assert all(row["source"]["draws"] % SEGMENTS == 0 and row["ours"]["median"] > 0 for row in found["rows"])


@pytest.mark.run_of_a_benchmark
def test_an_exchange_needs_two_ranks() -> None:
    done = run(*EXCHANGE, "--quick")
    assert done.returncode == 2
    assert "needs two ranks" in done.stderr


@pytest.mark.run_of_a_benchmark
@pytest.mark.usefixtures("launcher")
@pytest.mark.parametrize("ranks", [3, 4])
def test_exchanges_run(tmp_path: Path, ranks: int, results_of: ResultsOf) -> None:
    words = ["--quick", "--baselines", "none", "--results", str(tmp_path)]
    done = run("-m", "sordino.cli", "run", "-np", str(ranks), "--", "python", *EXCHANGE, *words)
    assert done.returncode == 0, done.stderr
    found = results_of(f"gossip_exchange_np{ranks}")
    assert {"crossover_blocks", "push-sum", "allreduce", "floor"} <= found["contestants"].keys()
    assert all(one["right"] for one in found["contestants"].values())


@pytest.mark.run_of_a_benchmark
@pytest.mark.usefixtures("launcher")
@pytest.mark.parametrize("by", figure_9_worker.ALGORITHMS)
def test_a_worker_of_figure_9_counts_what_it_sends(by: str) -> None:
    words = ["python", "-m", "claims.gossip.figure_9_worker", "--compute-ms", "3", "--by", by]
    places = {"SORDINO_RANKS_PER_NODE": "1", **jobs.paths()}
    done = run("-m", "sordino.cli", "run", "-np", "4", "--", *words, env=places)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    # Groups of two send their gradients once, and in addition the leader's parameters, which go to both ranks of
    # another group.
    wanted = {"allreduce": 1.5, "hierarchical": 2.0}.get(by, 1.0)
    assert found["right"] and found["sent"] / found["bytes"] == pytest.approx(wanted, rel=0.01)
