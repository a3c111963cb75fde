"""A rank is killed, and the algorithm is fitted to the remaining ranks (threads). They agree on groups, weights
and the manager, and do not make dropped optimizers again. The last rank continues to train alone."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from crew import PATIENCE_S, MakeCrew, Member, metric

import sordino.torch as hvd
from sordino.algorithms import ADPSGD, DPSGD, Algorithm, Crossover, DiLoCo, LocalSGD, NoLoCo, PushSum, ScheduledPull

GROUPS = LocalSGD(4, group_size=2, exchange="allreduce")
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


@pytest.mark.parametrize(
    ("algorithm", "ask", "expected"),
    [(Crossover(roulette=WEIGHTS), roulette, None), (ScheduledPull(schedule="manager", manager=2), manager, 1)],
    ids=["roulette", "manager"],
)
def test_what_was_chosen_for_a_lost_rank_is_not_for_its_replacement(
    crew_of: MakeCrew, algorithm: Algorithm, ask: Callable[[Member], Any], expected: object
) -> None:
    """The algorithm was chosen for ranks 0, 9, 1 and 2. Rank 9 has been lost, and rank 3 has joined, which was alone
    before."""

    def grow(member: Member) -> Any:
        wrapping = member.optimizer._wrapping
        members = (3,) if member.identity == 3 else (0, 9, 1, 2)
        wrapping.options = replace(wrapping.options, members=members)
        wrapping.after_growth()
        return ask(member)

    crew = crew_of(4, algorithm)
    crew.all(Member.step)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert crew.all(grow) == dict.fromkeys(range(4), expected)
    found = any("weights for ranks [0, 9, 1, 2] do not fit ranks [0, 1, 2, 3]" in str(one.message) for one in caught)
    assert found == (ask is roulette)


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
    crew.all(Member.train)
    crew.members[1].orders.put(let_go)
    crew.members[1].answers.get(timeout=PATIENCE_S)
    gc.collect()  # here, as only one thread at a time can collect
    for victim in (4, 5):
        crew.network.kill(victim)
    assert crew.all(metric) == dict.fromkeys(range(4), (4, 4, 6.0))
    crew.all(let_go)
    gc.collect()
    crew.all(another)
    assert set(crew.all(Member.train).values()) == {6}
    crew.network.kill(3)
    assert crew.all(metric) == dict.fromkeys(range(3), (3, 3, 3.0))
    assert set(crew.all(Member.train).values()) == {9}


@pytest.mark.parametrize("algorithm", [LocalSGD(100), DPSGD(100)], ids=str)
def test_parameters_that_were_frozen_before_a_loss_are_averaged(crew_of: MakeCrew, algorithm: Algorithm) -> None:
    """The remaining ranks average all parameters of the exchanges, also those that have been frozen since."""

    def frozen(member: Member) -> torch.Tensor:
        parameter = member.parameters[0]
        parameter.requires_grad_(False)
        parameter.grad = None
        return parameter.detach().clone()

    crew = crew_of(3, algorithm)
    crew.all(Member.train)
    before = crew.all(frozen)
    assert not torch.equal(before[0], before[1])
    crew.network.kill(2)
    crew.all(metric)
    for after in crew.all(frozen).values():
        torch.testing.assert_close(after, (before[0] + before[1]) / 2)


@pytest.mark.parametrize("algorithm", [LocalSGD(3), DiLoCo(3), NoLoCo(3), DPSGD(3)], ids=lambda one: type(one).__name__)
def test_a_loss_when_one_rank_has_frozen_a_parameter(crew_of: MakeCrew, algorithm: Algorithm) -> None:
    """All ranks freeze a parameter after their second step. At the loss, only rank 0 has done so."""

    def freeze(member: Member) -> None:
        member.parameters[0].requires_grad_(False)
        member.parameters[0].grad = None

    crew = crew_of(3, algorithm)
    crew.all(Member.step)
    first, second, _ = crew.members
    crew.living = [first]
    crew.all(Member.step)
    crew.all(freeze)
    crew.living = [first, second]
    crew.network.kill(2)
    assert set(crew.all(metric).values()) == {(2, 2, 1.0)}
    values = list(crew.all(lambda member: member.parameters[0].detach().clone()).values())
    torch.testing.assert_close(values[0], values[1])
    crew.living = [second]
    crew.all(Member.step)
    crew.all(freeze)
    crew.living = [first, second]
    assert set(crew.all(Member.train).values()) == {5}


@pytest.mark.parametrize(
    "algorithm", [LocalSGD(3), LocalSGD(3, aggregate="gradients"), DiLoCo(3)], ids=["models", "movements", "diloco"]
)
def test_a_loss_when_one_rank_has_unfrozen_a_parameter(crew_of: MakeCrew, algorithm: Algorithm) -> None:
    """All ranks unfreeze a parameter after their second step. Rank 0 waits in the next step when rank 1 notices the
    loss."""

    def begin(member: Member) -> None:
        vars(member).pop("optimizer")
        member.parameters = [parameter.detach().requires_grad_() for parameter in member.parameters]
        member.parameters[0].requires_grad_(False)
        member.optimizer = hvd.DistributedOptimizer(torch.optim.SGD(member.parameters, lr=0.1), algorithm=algorithm)
        member.pair = hvd.add_process_set([1, 2])  # type: ignore[attr-defined]

    def unfreeze(member: Member) -> None:
        member.parameters[0].requires_grad_(True)
        member.step()

    def meet_the_lost_rank(member: Member) -> float:
        return float(hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=member.pair))  # type: ignore[attr-defined]

    crew = crew_of(3, algorithm)
    crew.all(begin)
    crew.all(Member.step)
    first, second, _ = crew.members
    crew.living = [first]
    crew.all(Member.step)
    crew.order(unfreeze)
    crew.network.kill(2)
    crew.living = [second]
    assert crew.all(meet_the_lost_rank) == {1: 1.0}
    crew.all(Member.step)
    crew.order(unfreeze)
    crew.living = [first, second]
    crew.collect()
    for _ in range(2):
        crew.all(Member.step)
    crew.all(lambda member: member.optimizer.flush())
    assert set(crew.all(lambda member: len(member.optimizer._strategy.exchanged)).values()) == {4}  # type: ignore[attr-defined]
    if isinstance(algorithm, LocalSGD):  # counts the interval from the loss
        models = list(crew.all(Member.values).values())
        assert all(map(torch.equal, *models))
    crew.all(Member.train)
    assert set(crew.all(lambda member: member.context.epoch).values()) == {1}


def test_a_parameter_that_was_frozen_before_a_loss_takes_outer_steps_later(crew_of: MakeCrew) -> None:
    def freeze(member: Member) -> None:
        member.parameters[0].requires_grad_(False)
        member.parameters[0].grad = None

    def unfreeze(member: Member) -> None:
        member.parameters[0].requires_grad_(True)

    def momenta(member: Member) -> list[bool]:
        found = member.optimizer.state_dict()["sordino"]["momentum"]
        return [bool(found[name].any()) for name in sorted(found)]

    crew = crew_of(3, NoLoCo(1))
    crew.all(Member.step)
    crew.all(freeze)
    crew.network.kill(2)
    crew.all(metric)
    crew.all(unfreeze)
    crew.all(Member.train)
    assert list(crew.all(momenta).values()) == [[True] * 4] * 2


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
    crew.all(Member.train)
    crew.network.kill(2)
    crew.all(Member.train)
    for found in crew.all(lambda member: [step for step, _ in member.optimizer.distances]).values():
        assert found[:3] == [1, 2, 3] and found[-1] == 6


@pytest.mark.parametrize("algorithm", [None, GROUPS, LocalSGD(2, start=100), Crossover(group_size=2)], ids=str)
def test_the_last_one_trains_on(crew_of: MakeCrew, algorithm: Algorithm | None) -> None:
    crew = crew_of(3 if algorithm is None else 4, algorithm)
    crew.all(Member.train)
    for victim in range(1, len(crew.members)):
        crew.network.kill(victim)
    assert crew.all(Member.train) == {0: 6}
    assert crew.all(Member.train) == {0: 9}
