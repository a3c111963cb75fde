"""Ranks are lost at random moments, with every algorithm that survives losses. The other ranks take all their steps,
and meet in all operations. `SORDINO_TEST_EXAMPLES` sets the number of examples."""

from __future__ import annotations

import os
import time

import pytest
import torch
from algorithm_table import EXCHANGING, SURVIVING, SYNCHRONOUS
from crew import PATIENCE_S, Crew, Member, metric
from hypothesis import given, settings
from hypothesis import strategies as st

import sordino.torch as hvd
from sordino.algorithms import (
    Algorithm,
    CaPS,
    Crossover,
    ElasticAveraging,
    LocalSGD,
    PushSum,
    ScheduledPull,
    SegmentedGossip,
)
from sordino.runtime.recovery.losses import go_on_after

STEPS = 9
EXAMPLES = int(os.environ.get("SORDINO_TEST_EXAMPLES", 5))
EVEN = tuple(tuple(float(i != j) for j in range(6)) for i in range(6))
ALGORITHMS: list[Algorithm] = [
    *(one for name, one in SURVIVING.items() if name not in SYNCHRONOUS or name in EXCHANGING),
    Crossover(interval=2),
    Crossover(roulette=EVEN),
    SegmentedGossip(replicas=3),
    PushSum(peers=2),
    PushSum(overlap=2),
    LocalSGD(4),
    LocalSGD(1),
    LocalSGD(3, aggregate="gradients"),
    LocalSGD(2, group_size=2, exchange="allreduce", log_distance=2),
    LocalSGD(2, group_size=3, exchange="allreduce", aggregate="gradients"),
    LocalSGD(1, group_size=2, exchange="allreduce", start=4),
    Crossover(group_size=2),
    Crossover(group_size=3),
    Crossover(group_size=3, within="leader", interval=2),
    CaPS(threshold=101),
    ScheduledPull(schedule="manager", manager=3),
]


NAMES = [f"{number}-{type(algorithm).__name__}" for number, algorithm in enumerate(ALGORITHMS)]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=NAMES)
@settings(max_examples=EXAMPLES, deadline=None, derandomize=bool(os.environ.get("CI")))
@given(
    victims=st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True),
    moments=st.lists(st.tuples(st.integers(0, STEPS - 1), st.integers(0, 1500)), min_size=4, max_size=4),
    per_node=st.sampled_from([0, 1, 2]),
    check_finite=st.booleans(),
)
def test_the_others_go_on(
    algorithm: Algorithm, victims: list[int], moments: list[tuple[int, int]], per_node: int, check_finite: bool
) -> None:
    torch.set_num_threads(1)
    crew = Crew([rank // per_node if per_node else 0 for rank in range(6)], algorithm, check_finite)
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
    """Return the groups of ranks that have one model after an exchange, for algorithms that exchange in every step."""
    everybody = sorted(member.identity for member in crew.living)
    algorithm = crew.members[everybody[0]].optimizer._strategy.algorithm
    if isinstance(algorithm, LocalSGD) and algorithm.interval == 1:
        return [everybody]
    if isinstance(algorithm, Crossover) and algorithm.interval == 1:
        size = algorithm.group_size
        return [everybody[begin : begin + size] for begin in range(0, len(everybody), size)]
    return []


def train_on(member: Member) -> None:
    """Train again, without a loss."""
    for _ in range(2):
        member.step()


def train(member: Member) -> tuple[int, int, float]:
    """Train and then make an operation, as all ranks do: a rank that has lost another in a step waits for the others
    there."""
    for _ in range(STEPS):
        member.step()
    return metric(member)


# --- Ranks that are at different places of the program when one is lost -----------------------------------------------


def answer(member: Member) -> object:
    """Return the answer of one rank while the others do nothing."""
    return member.answers.get(timeout=PATIENCE_S)


def test_who_is_a_step_behind_finds_the_centre_alone() -> None:
    """ElasticAveraging: the other rank may have taken its last step, and then does not come to find a centre."""
    torch.set_num_threads(1)
    crew = Crew([0, 0, 0], ElasticAveraging())
    try:
        crew.all(Member.step)
        crew.network.kill(2)
        crew.all(Member.step)
        assert [member.identity for member in crew.living] == [0, 1]
        crew.members[0].orders.put(lambda member: member.optimizer._strategy.begin(member.optimizer) or "begun")
        assert answer(crew.members[0]) == "begun"
        one, other = crew.all(centre).values()
        assert all(map(torch.equal, one, other))
        crew.all(Member.step)
    finally:
        crew.end()


def centre(member: Member) -> list[torch.Tensor]:
    """Return the centre of elastic averaging. All remaining ranks have just averaged their parameters, and the centre
    is this mean."""
    found: list[torch.Tensor] = member.optimizer._strategy.state_dict()["centre"]
    flat = torch.cat([value.flatten() for value in member.values()])
    assert torch.equal(torch.cat(found)[: len(flat)], flat)
    return found


def test_who_asks_before_a_loss_is_answered_after_it() -> None:
    """check_finite: one rank asks whether gradients are finite when another one is lost; a third one asks later."""
    torch.set_num_threads(1)
    crew = Crew([0, 0, 0], Crossover(), check_finite=True)
    try:
        crew.all(Member.step)
        crew.members[0].orders.put(Member.step)
        time.sleep(0.2)  # it waits for the others
        crew.network.kill(2)
        crew.members[1].orders.put(meet_then_step)
        crew.members[2].orders.put(Member.step)
        crew.collect()
        assert [member.steps for member in crew.living] == [2, 2]
    finally:
        crew.end()


def meet_then_step(member: Member) -> None:
    """Hear of a loss, and then take the step."""
    while not member.context.world.failed:
        time.sleep(0.001)
    go_on_after(member.context, hvd.HorovodInternalError("another rank is lost"))
    member.step()
