"""A rank is lost when some of the others are further than others: while they recover from the loss of another rank, or
at another exact moment."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from crew import PATIENCE_S, Crew, MakeCrew, Member, metric, parameters

import sordino.torch as hvd
from sordino.algorithms import ADPSGD, Algorithm, Crossover, DiLoCo, LocalSGD, ScheduledPull
from sordino.algorithms.exchanging import ExchangingStrategy
from sordino.algorithms.gossip.strategy import GossipStrategy
from sordino.errors import PeerLost
from sordino.runtime.collectives.operation import Operation
from sordino.runtime.loss_state import Resized
from sordino.runtime.recovery import growth


def strategy(member: Member) -> ExchangingStrategy:
    found = member.optimizer._strategy
    assert isinstance(found, ExchangingStrategy)
    return found


class SecondLoss:
    """Kills rank 2 when rank 0 is at the end of a method of its strategy, and makes the method fail there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
        self.crew: Crew | None = None
        usual = getattr(ExchangingStrategy, method)

        def interrupted(strategy_: ExchangingStrategy) -> None:
            usual(strategy_)
            crew = self.crew
            if crew is not None and strategy_ is strategy(crew.members[0]):
                self.crew = None
                crew.network.kill(2)
                raise PeerLost("rank 2 is lost")

        monkeypatch.setattr(ExchangingStrategy, method, interrupted)

    def strike(self, crew: Crew, step: Callable[[Member], Any]) -> None:
        """Kill rank 3, let the others take a step, and check that rank 2 was killed meanwhile."""
        crew.living.pop()
        self.crew = crew
        crew.network.kill(3)
        crew.all(step)
        assert self.crew is None


def test_an_exchange_that_was_given_up_counts_once(crew_of: MakeCrew, monkeypatch: pytest.MonkeyPatch) -> None:
    """The meeting after the first loss succeeds on rank 1, and fails on rank 0."""
    second = SecondLoss(monkeypatch, "_meet_all")
    crew = crew_of(4, Crossover())
    crew.all(Member.train)
    first, crew.living = crew.living.pop(), crew.living
    second.crew = crew
    crew.order(Member.step)
    time.sleep(0.05)  # all wait in the exchange for rank 3
    crew.network.kill(first.identity)
    crew.collect()
    assert second.crew is None
    crew.all(Member.train)
    assert set(crew.all(lambda member: strategy(member).round).values()) == {7}
    assert set(crew.all(metric).values()) == {(2, 2, 1.0)}


def test_groups_stay_together_until_the_rate_falls(crew_of: MakeCrew, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank takes two losses within a step for a fall of the learning rate."""

    def step(member: Member) -> None:
        member.optimizer.step(member.backward)

    second = SecondLoss(monkeypatch, "_meet_all")
    crew = crew_of(4, LocalSGD(2, start="decay"))
    crew.all(step)
    second.strike(crew, step)
    assert [strategy(member).state_dict()["alone"] for member in crew.living] == [False, False]


@pytest.mark.parametrize("algorithm", [Crossover(), LocalSGD(1), DiLoCo(1)], ids=lambda one: type(one).__name__)
def test_two_optimizers_recover_in_one_order(
    crew_of: MakeCrew, monkeypatch: pytest.MonkeyPatch, algorithm: Algorithm
) -> None:
    """The recovery of the first optimizer succeeds on rank 1, which continues with the second one, and fails on rank
    0."""
    second = SecondLoss(monkeypatch, "renew")
    crew = crew_of(4, algorithm)
    others: dict[int, Any] = {}

    def wrap(member: Member) -> None:
        others[member.identity] = hvd.DistributedOptimizer(
            torch.optim.SGD([*parameters(), torch.nn.Parameter(torch.zeros(3))], lr=0.1), algorithm=algorithm
        )

    def step(member: Member) -> None:
        member.step()
        others[member.identity].step()

    crew.all(wrap)
    crew.all(step)
    second.strike(crew, step)
    crew.all(step)
    assert set(crew.all(metric).values()) == {(2, 2, 1.0)}


@pytest.mark.parametrize(
    "algorithm", [ADPSGD(), ScheduledPull(1, schedule="manager")], ids=lambda one: type(one).__name__
)
def test_statistics_go_on(crew_of: MakeCrew, monkeypatch: pytest.MonkeyPatch, algorithm: Algorithm) -> None:
    def counts(member: Member) -> dict[str, int]:
        return {name: one for name, one in member.optimizer.statistics.as_dict().items() if isinstance(one, int)}

    second = SecondLoss(monkeypatch, "_meet_all")
    crew = crew_of(4, algorithm)
    crew.all(Member.train)
    before = crew.all(counts)
    assert before[0]["messages"] > 0
    second.strike(crew, metric)
    crew.all(Member.step)
    for identity, after in crew.all(counts).items():
        assert all(count >= before[identity][name] for name, count in after.items())


def test_a_loss_when_optimizers_are_made_for_a_newcomer(crew_of: MakeCrew, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1, the newcomer, has made its optimizer. On rank 0 that fails, so both ranks make it again. Only rank 0 has
    outer parameters."""
    monkeypatch.setenv("SORDINO_TIMEOUT_S", "30")
    crew = crew_of(3, DiLoCo(1))
    crew.all(Member.step)
    usual, lost = GossipStrategy.attach, threading.Event()

    def attach(strategy_: GossipStrategy) -> None:
        usual(strategy_)
        if strategy_.context is crew.members[0].context and not lost.is_set():
            lost.set()
            crew.network.kill(2)
            raise PeerLost("rank 2 is lost")

    def grow(member: Member) -> None:
        """Do what follows once all ranks have adopted a grown world."""
        member.context.losses.forget()
        member.context.losses.unsettled = True
        if member.identity == 1:
            strategy(member)._mixing = None  # type: ignore[attr-defined]
        growth._make_again(member.context)

    monkeypatch.setattr(GossipStrategy, "attach", attach)
    crew.order(grow)
    crew.living.pop()
    crew.collect()
    assert set(crew.all(lambda member: member.context.epoch).values()) == {1}


def test_a_loss_when_one_rank_has_been_told_of_a_growth(crew_of: MakeCrew, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks have grown to four. Rank 3 is lost when rank 1 has completed its callback, and rank 0 has not."""
    monkeypatch.setenv("SORDINO_TIMEOUT_S", "30")
    crew = crew_of(4)
    completed = threading.Event()
    told: dict[int, list[tuple[int, int, float]]] = {identity: [] for identity in range(4)}

    def grow(member: Member) -> None:
        def resized(before: int, now: int) -> None:
            total = float(hvd.allreduce(torch.ones(1), op=hvd.Sum))
            if now == 4 and member.identity == 0:
                completed.wait(PATIENCE_S)
                crew.network.kill(3)
                hvd.allreduce(torch.ones(1), process_set=pair)
            told[member.identity].append((before, now, total))
            if member.identity == 1:
                completed.set()

        pair = hvd.add_process_set([0, 3])
        member.context.losses.on_resize.append(Resized(resized, 3))
        growth._make_again(member.context)

    crew.order(grow)
    crew.living.pop()
    crew.collect()
    assert set(crew.all(lambda member: member.context.epoch).values()) == {1}
    assert [told[identity] for identity in range(3)] == [[(3, 4, 4.0), (4, 3, 3.0)]] * 3


def test_a_loss_when_one_rank_has_met_the_others_with_a_copy(
    crew_of: MakeCrew, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of an optimizer meets the other ranks in its first reduction. Rank 1 does not receive what they have
    sent."""
    monkeypatch.setenv("SORDINO_TIMEOUT_S", "30")
    crew = crew_of(3)
    crew.all(Member.step)
    usual, received, lost = Operation._run, threading.Event(), threading.Event()

    def run(operation: Operation, uncopied: bool) -> Any:
        handle = usual(operation, uncopied)
        if "agreement" in operation._name[1]:
            if operation.context is crew.members[0].context:
                received.set()
            elif operation.context is crew.members[1].context and not lost.is_set():
                received.wait(PATIENCE_S)
                lost.set()
                crew.network.kill(2)
                raise PeerLost("rank 2 is lost")
        return handle

    def use_copy(member: Member) -> None:
        member.parameters, member.optimizer = copy.deepcopy((member.parameters, member.optimizer))

    monkeypatch.setattr(Operation, "_run", run)
    crew.all(use_copy)
    crew.all(Member.step)
    assert lost.is_set()
    assert set(crew.all(lambda member: member.context.epoch).values()) == {1}
    models = list(crew.all(Member.values).values())
    assert all(map(torch.equal, *models))
