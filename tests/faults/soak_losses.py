"""Ranks that are lost at random moments, with every algorithm that goes on: the others take all their steps, and
meet in all operations. For longer runs by hand: `python -m pytest tests/faults/soak_losses.py`."""

from __future__ import annotations

import time

import pytest
import torch
from crew import Crew, Member, metric
from hypothesis import given, settings
from hypothesis import strategies as st

from sordino.algorithms import (
    ADPSGD,
    DPSGD,
    Algorithm,
    Crossover,
    ElasticAveraging,
    GossipGraD,
    LocalSGD,
    ParameterSkipping,
    PushSum,
    ScheduledPull,
    SegmentedGossip,
)

STEPS = 9
EVEN = tuple(tuple(float(i != j) for j in range(6)) for i in range(6))
ALGORITHMS: list[Algorithm] = [
    Crossover(),
    Crossover(interval=2),
    Crossover(roulette=EVEN),
    DPSGD(),
    GossipGraD(),
    SegmentedGossip(replicas=3),
    PushSum(peers=2),
    PushSum(overlap=2),
    ElasticAveraging(),
    LocalSGD(4),
    LocalSGD(1),
    LocalSGD(3, aggregate="gradients"),
    ParameterSkipping(threshold=101),
    ScheduledPull(),
    ScheduledPull(schedule="manager", manager=3),
    ADPSGD(),
]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
@settings(max_examples=12, deadline=None)
@given(
    victims=st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True),
    moments=st.lists(st.tuples(st.integers(0, STEPS - 1), st.integers(0, 1500)), min_size=4, max_size=4),
    per_node=st.sampled_from([0, 1, 2]),
)
def test_the_others_go_on(
    algorithm: Algorithm, victims: list[int], moments: list[tuple[int, int]], per_node: int
) -> None:
    torch.set_num_threads(1)
    crew = Crew([rank // per_node if per_node else 0 for rank in range(6)], algorithm)
    try:
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
        assert left == set(range(6)) - set(victims)
        assert set(answers.values()) == {(len(left), len(left), float(sum(left)))}
        assert all(member.steps == STEPS for member in crew.living)
        models = list(crew.all(Member.values).values())
        assert all(bool(value.isfinite().all()) for model in models for value in model)
    finally:
        crew.end()


def train(member: Member) -> tuple[int, int, float]:
    """And come to an operation, as all others do: who has lost a rank in a step waits for them."""
    for _ in range(STEPS):
        member.step()
    return metric(member)
