"""Ranks that are lost at random moments, with every algorithm that goes on: the others take all their steps, and
meet in all operations. For longer runs by hand: `python -m pytest tests/faults/soak_losses.py`."""

from __future__ import annotations

import time

import pytest
import torch
from crew import Crew, Member, metric
from hypothesis import Phase, given, settings
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
    LocalSGD(2, group_size=2, exchange="allreduce", log_distance=2),
    LocalSGD(2, group_size=3, exchange="allreduce", aggregate="gradients"),
    LocalSGD(1, group_size=2, exchange="allreduce", start=4),
    Crossover(group_size=2),
    Crossover(group_size=3),
    Crossover(group_size=3, within="leader", interval=2),
    ParameterSkipping(threshold=101),
    ScheduledPull(),
    ScheduledPull(schedule="manager", manager=3),
    ADPSGD(),
]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
@settings(max_examples=12, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
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
    finally:
        crew.end()


def groups(crew: Crew) -> list[list[int]]:
    """Those who have one model after an exchange, where every step has one."""
    everybody = sorted(member.identity for member in crew.living)
    algorithm = crew.members[everybody[0]].optimizer._reducer.algorithm
    if isinstance(algorithm, LocalSGD) and algorithm.interval == 1:
        return [everybody]
    if isinstance(algorithm, Crossover) and algorithm.interval == 1:
        size = algorithm.group_size
        return [everybody[begin : begin + size] for begin in range(0, len(everybody), size)]
    return []


def train_on(member: Member) -> None:
    """Once more, with nobody lost."""
    for _ in range(2):
        member.step()


def train(member: Member) -> tuple[int, int, float]:
    """And come to an operation, as all others do: who has lost a rank in a step waits for them."""
    for _ in range(STEPS):
        member.step()
    return metric(member)
