"""Properties that hold after a loss at a special moment: between forward and backward, before groups are on their own,
of the last rank, in an operation of a process set. Also objects that are made again afterwards."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from crew import PATIENCE_S, Crew, Member, loss, metric

import sordino.torch as hvd
from sordino.algorithms import (
    ADPSGD,
    Algorithm,
    CaPS,
    Crossover,
    ElasticAveraging,
    LocalSGD,
    PushSum,
    ScheduledPull,
)
from sordino.errors import PeerLost

GROUPS = LocalSGD(4, group_size=2, exchange="allreduce")
MakeCrew = Callable[..., Crew]


@pytest.fixture
def crew_of() -> Iterator[MakeCrew]:
    torch.set_num_threads(1)
    made: list[Crew] = []

    def make(size: int, algorithm: Algorithm | None = None) -> Crew:
        made.append(Crew([0] * size, algorithm))
        return made[-1]

    yield make
    for crew in made:
        crew.end()


def train(member: Member) -> int:
    for _ in range(3):
        member.step()
    return member.steps


@pytest.mark.parametrize("algorithm", [None, GROUPS, LocalSGD(2, start=100), Crossover(group_size=2)], ids=str)
def test_the_last_one_trains_on(crew_of: MakeCrew, algorithm: Algorithm | None) -> None:
    crew = crew_of(3 if algorithm is None else 4, algorithm)
    crew.all(train)
    for victim in range(1, len(crew.members)):
        crew.network.kill(victim)
    assert crew.all(train) == {0: 6}
    assert crew.all(train) == {0: 9}


@pytest.mark.parametrize("algorithm", [None, LocalSGD(4), GROUPS, Crossover()], ids=str)
def test_a_loss_between_forward_and_backward(crew_of: MakeCrew, algorithm: Algorithm | None) -> None:
    """Recovery changes parameters, but does not spoil the graph of a loss that is still to be differentiated."""
    crew = crew_of(4, algorithm)

    def forward(member: Member) -> None:
        member.optimizer.zero_grad()
        member.loss = loss(list(member.parameters), member.identity, member.steps)  # type: ignore[attr-defined]

    def rest(member: Member) -> int:
        hvd.allreduce(member.loss.detach())  # type: ignore[attr-defined]
        member.loss.backward()  # type: ignore[attr-defined]
        member.finish_step()
        return member.steps

    crew.all(Member.step)
    crew.all(forward)
    crew.network.kill(3)
    assert crew.all(rest) == {0: 2, 1: 2, 2: 2}


@pytest.mark.parametrize("size", [1, 2])
def test_groups_stay_together_until_the_rate_falls(crew_of: MakeCrew, size: int) -> None:
    """A rank that hears of a loss does not take it for the end of a constant learning rate, however it hears. Until
    groups are on their own, all ranks have one model."""
    algorithm = LocalSGD(2, group_size=size, exchange="allreduce", start="decay")

    def go_on(member: Member) -> tuple[int, int, float]:
        for _ in range(12):
            member.step()
        return metric(member)

    for delay_ms in (0, 1, 2, 3, 4, 6, 8, 12):
        crew = crew_of(4, algorithm)
        crew.all(Member.step)
        crew.order(go_on)
        time.sleep(delay_ms * 1e-3)
        crew.network.kill(3)
        crew.settle()
        crew.all(Member.step)
        assert len(crew.living) == 3
        assert not any(crew.all(lambda member: member.optimizer._strategy._alone).values())  # type: ignore[union-attr]
        models = list(crew.all(Member.values).values())
        assert all(torch.equal(one, first) for model in models for one, first in zip(model, models[0]))


def test_ranks_that_come_later_to_an_operation_of_a_set(crew_of: MakeCrew) -> None:
    """One rank waits in an operation of a set when a member of the set is lost; another rank comes to it afterwards."""
    crew = crew_of(4)

    def add(member: Member) -> None:
        member.sets = [hvd.add_process_set([0, 1, 3]), hvd.add_process_set([1, 2])]  # type: ignore[attr-defined]

    def work(member: Member) -> list[float]:
        mine, other = member.sets  # type: ignore[attr-defined]
        if member.identity == 2:
            assert lost.wait(PATIENCE_S)
        sets = [one for one in (other, mine) if one.included()]
        found = [float(hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=one)) for one in sets]
        metric(member)
        return found

    lost = threading.Event()
    crew.all(add)
    crew.order(work)
    time.sleep(0.1)
    crew.network.kill(3)
    time.sleep(0.2)
    lost.set()
    assert crew.settle() == {0: [2.0], 1: [2.0, 2.0], 2: [2.0]}


@pytest.mark.parametrize("algorithm", [LocalSGD(1, exchange="allreduce"), Crossover()], ids=str)
def test_an_exchange_that_one_had_to_give_up(crew_of: MakeCrew, algorithm: Algorithm) -> None:
    """The exchange counts for all ranks. Otherwise a rank that gave it up would make one more than ranks that completed
    it."""
    crew = crew_of(4, algorithm)
    crew.all(Member.step)
    done, lost = threading.Event(), threading.Event()

    def step(member: Member) -> None:
        steps = member.optimizer._strategy
        name = "_average" if isinstance(algorithm, LocalSGD) else "_mix"
        exchange = getattr(steps, name)

        def give_up() -> None:
            setattr(steps, name, exchange)
            exchange()
            done.set()
            assert lost.wait(PATIENCE_S)
            raise PeerLost("rank 3 is gone", [3])

        if member.identity == 1:
            setattr(steps, name, give_up)
        member.step()

    crew.order(step)
    assert done.wait(PATIENCE_S)
    crew.network.kill(3)
    lost.set()
    crew.settle()
    assert len(set(crew.all(lambda member: member.optimizer._strategy.round).values())) == 1
    assert crew.all(train) == dict.fromkeys(range(3), 5)


WEIGHTS = tuple(tuple(0.0 if i == j else float(j + 1) for j in range(4)) for i in range(4))


def roulette(member: Member) -> Any:
    return member.optimizer._strategy.algorithm.roulette  # type: ignore[union-attr]


def manager(member: Member) -> int:
    reducer: Any = member.optimizer._strategy
    return member.context.world.identities[reducer.algorithm.manager]


def group_size(member: Member) -> int:
    reducer: Any = member.optimizer._strategy
    return int(reducer.algorithm.group_size)


@pytest.mark.parametrize(
    ("algorithm", "ask", "expected"),
    [
        (Crossover(roulette=WEIGHTS), roulette, ((0.0, 3.0, 4.0), (2.0, 0.0, 4.0), (2.0, 3.0, 0.0))),
        (ScheduledPull(schedule="manager", manager=3), manager, 3),
        (LocalSGD(2, group_size=2, exchange="allreduce"), group_size, 1),
    ],
    ids=["roulette", "manager", "groups"],
)
def test_what_was_chosen_for_all_is_fitted_once(
    crew_of: MakeCrew, algorithm: Algorithm, ask: Callable[[Member], Any], expected: object
) -> None:
    """The algorithm is fitted once for all ranks, also if the optimizer gets more parameters later. The requested
    settings are kept."""
    crew = crew_of(4, algorithm)

    def add(member: Member) -> Any:
        more = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
        member.optimizer.add_param_group({"params": [more]})
        return ask(member)

    crew.all(Member.step)
    crew.network.kill(0)
    crew.all(Member.step)
    crew.all(metric)
    assert set(crew.all(ask).values()) == {expected}
    assert set(crew.all(add).values()) == {expected}
    if ask is group_size:
        crew.network.kill(1)
        crew.all(metric)
        assert set(crew.all(ask).values()) == {2}


def test_who_is_told_of_ranks_may_call_operations(crew_of: MakeCrew) -> None:
    crew = crew_of(4)

    def register(member: Member) -> None:
        def resized(before: int, now: int) -> None:
            told.append((before, now, float(hvd.allreduce(torch.ones(1), op=hvd.Sum))))

        told: list[tuple[int, int, float]] = []
        member.told = told  # type: ignore[attr-defined]
        hvd.on_resize(resized)

    crew.all(register)
    crew.all(Member.step)
    crew.network.kill(3)
    crew.all(Member.step)
    crew.network.kill(1)
    assert set(crew.all(metric).values()) == {(2, 2, 2.0)}
    told = crew.all(lambda member: member.told)  # type: ignore[attr-defined]
    assert list(told.values()) == [[(4, 3, 3.0), (3, 2, 2.0)]] * 2


def test_distances_from_before_a_loss_are_kept(crew_of: MakeCrew) -> None:
    crew = crew_of(3, LocalSGD(2, log_distance=1))
    crew.all(train)
    crew.network.kill(2)
    crew.all(train)
    for found in crew.all(lambda member: [step for step, _ in member.optimizer.distances]).values():
        assert found[:3] == [1, 2, 3] and found[-1] == 6


@pytest.mark.parametrize("algorithm", [Crossover(group_size=2), GROUPS, ADPSGD(), PushSum(overlap=2)], ids=str)
def test_some_have_let_their_optimizer_go_already(crew_of: MakeCrew, algorithm: Algorithm) -> None:
    """A loss is noticed when one rank has dropped an optimizer that the others are just about to replace or drop. The
    optimizer is not made again, and no rank waits for the rank without one."""

    def let_go(member: Member) -> None:
        vars(member).pop("optimizer", None)

    def another(member: Member) -> None:
        sgd = torch.optim.SGD(member.parameters, lr=0.1)
        member.optimizer = hvd.DistributedOptimizer(sgd, algorithm=algorithm)

    crew = crew_of(6, algorithm)
    crew.all(train)
    crew.members[1].orders.put(let_go)
    crew.members[1].answers.get(timeout=PATIENCE_S)
    gc.collect()  # here, as only one thread at a time can do this
    for victim in (4, 5):
        crew.network.kill(victim)
    assert crew.all(metric) == dict.fromkeys(range(4), (4, 4, 6.0))
    crew.all(let_go)
    gc.collect()
    crew.all(another)
    assert set(crew.all(train).values()) == {6}
    crew.network.kill(3)
    assert crew.all(metric) == dict.fromkeys(range(3), (3, 3, 3.0))
    assert set(crew.all(train).values()) == {9}


COLLECTED = [
    CaPS(threshold=101),
    PushSum(overlap=2),
    ElasticAveraging(),
    ADPSGD(),
    LocalSGD(4, aggregate="gradients"),
    LocalSGD(4, group_size=2, exchange="allreduce", aggregate="gradients"),
    Crossover(group_size=2),
]


@pytest.mark.parametrize("algorithm", COLLECTED, ids=str)
def test_losses_while_all_is_taken_in_and_parameters_are_added(crew_of: MakeCrew, algorithm: Algorithm) -> None:
    def work(member: Member) -> tuple[int, int, float]:
        for _ in range(3):
            member.step()
            member.optimizer.flush()
        extra = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
        member.optimizer.add_param_group({"params": [extra]})
        member.optimizer.flush()
        member.flat = torch.cat([*map(torch.flatten, member.values()), extra.detach()])  # type: ignore[attr-defined]
        return metric(member)

    for delay_ms in (1, 3, 5, 7, 9, 12, 16, 20):
        crew = crew_of(6, algorithm)
        crew.all(metric)
        crew.order(work)
        time.sleep(delay_ms * 1e-3)
        crew.network.kill(2)
        crew.settle()
        assert {member.identity for member in crew.living} == {0, 1, 3, 4, 5}, [one.ended for one in crew.members]
        models: list[torch.Tensor] = list(crew.all(lambda member: member.flat).values())  # type: ignore[attr-defined]
        assert all(bool(model.isfinite().all()) for model in models)
        # No rank continues with the intermediate result of an averaging that was given up.
        most = 9 if isinstance(algorithm, LocalSGD) else 4
        assert all(float(model.abs().max()) < most for model in models)
