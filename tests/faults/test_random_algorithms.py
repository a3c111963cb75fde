"""Ranks, as threads, are killed at random moments, with every algorithm that survives losses. The other ranks take all
their steps, and meet in all operations. `SORDINO_TEST_EXAMPLES` sets the number of examples."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
from algorithm_table import EXCHANGING, SURVIVING, SYNCHRONOUS
from crew import Crew, Member, metric
from hypothesis import given, settings
from hypothesis import strategies as st

import sordino.torch as hvd
from sordino.algorithms import (
    Algorithm,
    AllReduce,
    CaPS,
    Crossover,
    DiLoCo,
    LocalSGD,
    NoLoCo,
    PushSum,
    ScheduledPull,
    SegmentedGossip,
)

STEPS = 9
EVEN = tuple(tuple(float(i != j) for j in range(6)) for i in range(6))
ALGORITHMS: list[Algorithm] = [
    *(one for name, one in SURVIVING.items() if name not in SYNCHRONOUS or name in EXCHANGING),
    Crossover(interval=2),
    Crossover(compression="int8"),
    Crossover(roulette=EVEN),
    SegmentedGossip(replicas=3),
    PushSum(peers=2),
    PushSum(overlap=2),
    NoLoCo(2),
    NoLoCo(2, compression="int4"),
    NoLoCo(1, peers=3, group_size=2),
    LocalSGD(4),
    LocalSGD(1),
    LocalSGD(3, aggregate="gradients"),
    LocalSGD(1, compression="int8"),
    LocalSGD(2, group_size=2, exchange="allreduce", log_distance=2),
    LocalSGD(2, group_size=3, exchange="allreduce", aggregate="gradients"),
    LocalSGD(1, group_size=2, exchange="allreduce", start=4),
    Crossover(group_size=2),
    Crossover(group_size=3),
    Crossover(group_size=3, within="leader", interval=2),
    DiLoCo(2, compression="int8", overlap=1),
    CaPS(threshold=101),
    ScheduledPull(schedule="manager", manager=3),
]


NAMES = [f"{number}-{type(algorithm).__name__}" for number, algorithm in enumerate(ALGORITHMS)]
CODECS = ["int8", "sign", "TopK(ratio=0.25, chunk=32)", "PowerSGD(rank=1)"]
CASES = [(one, hvd.Compression.none) for one in ALGORITHMS] + [(AllReduce(), codec) for codec in CODECS]


@pytest.mark.parametrize(("algorithm", "compression"), CASES, ids=[*NAMES, *CODECS])
def test_the_others_go_on(algorithm: Algorithm, compression: Any, thorough: bool) -> None:
    examples = int(os.environ.get("SORDINO_TEST_EXAMPLES", 5 if thorough else 3))

    @settings(max_examples=examples, deadline=None, derandomize=bool(os.environ.get("CI")))
    @given(
        victims=st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True),
        moments=st.lists(st.tuples(st.integers(0, STEPS - 1), st.integers(0, 1500)), min_size=4, max_size=4),
        per_node=st.sampled_from([0, 1, 2]),
        check_finite=st.booleans(),
    )
    def losses(victims: list[int], moments: list[tuple[int, int]], per_node: int, check_finite: bool) -> None:
        crew = Crew(6, algorithm, per_node, check_finite, compression)
        try:
            lose(crew, victims, moments)
        finally:
            crew.end()

    losses()


def lose(crew: Crew, victims: list[int], moments: list[tuple[int, int]]) -> None:
    """Kill each victim at its moment (a step, and a delay after it in microseconds) while all ranks train."""
    crew.all(metric)
    crew.order(train)
    begun = time.monotonic()
    for victim, (step, delay) in sorted(zip(victims, moments), key=lambda one: one[1]):
        while crew.members[victim].steps < step and time.monotonic() < begun + 20:
            time.sleep(0.0005)
        time.sleep(delay * 1e-6)
        crew.network.kill(victim)
    crew.collect()
    answers = crew.all(metric)
    left = {member.identity for member in crew.living}
    assert left == set(range(6)) - set(victims), {one.identity: one.ended for one in crew.members}
    assert set(answers.values()) == {(len(left), len(left), float(sum(left)))}
    assert all(member.steps == STEPS for member in crew.living)
    models = list(crew.all(Member.values).values())
    assert all(bool(value.isfinite().all()) for model in models for value in model)
    crew.all(train_on)
    for members in groups(crew):
        values = [crew.members[one].values() for one in members]
        for other in values[1:]:
            torch.testing.assert_close(other, values[0], rtol=1e-9, atol=1e-12)


def groups(crew: Crew) -> list[list[int]]:
    """Return the groups of ranks that have one model after an exchange, for algorithms that exchange in every step."""
    remaining = sorted(member.identity for member in crew.living)
    algorithm = crew.members[remaining[0]].optimizer._strategy.algorithm
    if isinstance(algorithm, AllReduce) or (isinstance(algorithm, LocalSGD) and algorithm.interval == 1):
        return [remaining]
    if isinstance(algorithm, Crossover) and algorithm.interval == 1:
        size = algorithm.group_size
        return [remaining[begin : begin + size] for begin in range(0, len(remaining), size)]
    return []


def train_on(member: Member) -> None:
    for _ in range(2):
        member.step()


def train(member: Member) -> tuple[int, int, float]:
    """Train, then call operations: there, a rank that has noticed a loss in a step waits for the others."""
    for _ in range(STEPS):
        member.step()
    return metric(member)
