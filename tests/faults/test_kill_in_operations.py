"""A rank is killed in an operation, or between the parts of a step; ranks are threads. The remaining ranks agree on
whether the operation counts, and on their tensors, errors and order."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from crew import PATIENCE_S, Crew, MakeCrew, Member, loss, metric

import sordino.torch as hvd
from sordino.algorithms import Algorithm, Crossover, LocalSGD
from sordino.errors import OperationMismatch, PeerLost
from sordino.runtime.context import current
from sordino.runtime.recovery.losses import go_on_after, together
from sordino.torch import process_sets

ELEMENTS = 6_000_000


@pytest.fixture
def crew(crew_of: MakeCrew) -> Crew:
    return crew_of(4, per_node=2)


def hear_of_a_loss(member: Member) -> None:
    """Wait until this rank knows of a loss, and meet the other ranks."""
    while not member.context.world.failed:
        time.sleep(0.001)
    go_on_after(member.context, hvd.HorovodInternalError("another rank is lost"))


def begin_in_place(member: Member) -> None:
    """Start a long operation on a tensor that holds this rank's number."""
    member.tensor = torch.full((ELEMENTS,), float(member.identity + 1))  # type: ignore[attr-defined]
    member.handle = hvd.allreduce_async_(member.tensor, op=hvd.Sum)  # type: ignore[attr-defined]


@pytest.mark.parametrize("delay_us", [0, 2000, 5000, 10000, 20000])
def test_an_operation_that_fails_leaves_its_tensors_as_they_were(crew: Crew, delay_us: int) -> None:
    def work(member: Member) -> tuple[bool, float, float]:
        done = True
        try:
            hvd.synchronize(member.handle)  # type: ignore[attr-defined]
        except PeerLost:
            done = False
        metric(member)  # ranks that have the result meet those without
        time.sleep(0.01)  # for messages that are still in flight
        return done, float(member.tensor.min()), float(member.tensor.max())  # type: ignore[attr-defined]

    crew.all(begin_in_place)
    time.sleep(delay_us * 1e-6)
    crew.network.kill(3)
    crew.order(work)
    for identity, (done, low, high) in crew.settle().items():
        assert low == high and low in ((10, 6) if done else (identity + 1,))


def test_what_all_refuse_is_no_part_of_what_is_repeated(crew: Crew) -> None:
    """All ranks raise the error, and a loss at this moment leaves no rank without an answer."""

    def disagree(member: Member) -> str:
        try:
            hvd.allreduce(torch.ones(1 + member.identity % 2), name="mine")
        except OperationMismatch as error:
            return type(error).__name__
        return "well"

    for victim in (1, 2):
        crew.order(disagree)
        crew.network.kill(victim)
        answers = set(crew.settle().values())
        assert answers <= {OperationMismatch.__name__, "well"}
        counts = {answer[:2] for answer in crew.all(metric).values()}
        assert counts == {(len(crew.living), len(crew.living))}


@pytest.mark.parametrize("delay_us", [0, 300, 600, 1000, 1500, 2000, 3000, 4000])
def test_process_sets_come_and_go_while_ranks_are_lost(crew: Crew, delay_us: int) -> None:
    def work(member: Member) -> tuple[int, int]:
        for _ in range(6):
            ranks = [rank for rank, identity in enumerate(member.context.world.identities) if identity in (0, 2)]
            part = hvd.add_process_set(ranks)
            if part.included():
                hvd.allreduce(torch.ones(5), op=hvd.Sum, process_set=part)
            hvd.remove_process_set(part)
        return metric(member)[:2]

    crew.all(metric)
    crew.order(work)
    time.sleep(delay_us * 1e-6)
    crew.network.kill(1)
    (answer,) = set(crew.settle().values())
    # The rank is lost after, between or before the two operations of metric().
    assert answer in {(4, 4), (4, 3), (3, 3)}
    assert set(crew.all(work).values()) == {(3, 3)}


def test_ranks_that_come_later_to_an_operation_of_a_set(crew_of: MakeCrew) -> None:
    """One rank waits in an operation of a set when a member of the set is lost. Another rank calls the operation
    afterwards."""
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


def test_a_set_that_was_removed_and_added_again_is_one_set_after_a_loss(crew_of: MakeCrew) -> None:
    crew = crew_of(3)

    def add(member: Member) -> None:
        member.set = hvd.ProcessSet([0, 1])  # type: ignore[attr-defined]
        for _ in range(2):
            hvd.add_process_set(member.set)  # type: ignore[attr-defined]
            hvd.remove_process_set(member.set)  # type: ignore[attr-defined]
        hvd.add_process_set(member.set)  # type: ignore[attr-defined]

    def remove(member: Member) -> tuple[int, int]:
        before = len(member.context.world.sets())
        hvd.remove_process_set(member.set)  # type: ignore[attr-defined]
        return before, len(member.context.world.sets())

    crew.all(add)
    crew.network.kill(2)
    crew.all(metric)
    assert set(crew.all(remove).values()) == {(2, 1)}  # the set of all ranks is one


def test_a_set_that_one_has_added_and_another_has_not_is_added_again(
    crew_of: MakeCrew, monkeypatch: pytest.MonkeyPatch
) -> None:
    crew = crew_of(3)
    make, lost = process_sets.new_set_id, threading.Event()

    def make_and_lose(ranks: list[int]) -> int:
        made = make(ranks)
        if current().identity == 1 and not lost.is_set():
            lost.set()
            crew.network.kill(2)
            raise PeerLost("rank 2 is lost", ranks=(2,))
        return made

    def add(member: Member) -> tuple[int, int]:
        made = hvd.add_process_set([0, 1])
        hvd.allreduce(torch.ones(1), process_set=made)
        return made.process_set_id, len(member.context.world.sets())  # type: ignore[return-value]

    monkeypatch.setattr(process_sets, "new_set_id", make_and_lose)
    crew.order(add)
    assert set(crew.settle().values()) == {(1, 2)}


def test_what_one_has_and_another_has_not_begun_is_undone_and_done_again(crew_of: MakeCrew) -> None:
    crew = crew_of(3)

    def work(member: Member) -> list[str]:
        done: list[str] = []
        lockstep = member.context.lockstep("test", hvd.global_process_set)
        together(
            member.context, hvd.global_process_set, lambda: done.append("done"), lambda: done.append("undone"), lockstep
        )
        return done

    def work_later(member: Member) -> list[str]:
        hear_of_a_loss(member)
        return work(member)

    crew.all(metric)
    crew.members[0].orders.put(work)
    time.sleep(0.2)  # it waits until the others have the result
    crew.network.kill(2)
    crew.members[1].orders.put(work_later)
    crew.members[2].orders.put(metric)
    assert crew.collect() == {0: ["done", "undone", "done"], 1: ["done"]}


@pytest.mark.parametrize(
    "algorithm", [None, LocalSGD(4), LocalSGD(4, group_size=2, exchange="allreduce"), Crossover()], ids=str
)
def test_a_loss_between_forward_and_backward(crew_of: MakeCrew, algorithm: Algorithm | None) -> None:
    """Recovery changes parameters, but a loss value that was computed before can still be differentiated."""
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


def test_who_asks_before_a_loss_is_answered_after_it(crew_of: MakeCrew) -> None:
    """check_finite: one rank asks whether gradients are finite when another one is lost; a third one asks later."""
    crew = crew_of(3, Crossover(), check_finite=True)
    crew.all(Member.step)
    crew.members[0].orders.put(Member.step)
    time.sleep(0.2)  # it waits for the others
    crew.network.kill(2)
    crew.members[1].orders.put(lambda member: hear_of_a_loss(member) or member.step())
    crew.members[2].orders.put(Member.step)
    crew.collect()
    assert [member.steps for member in crew.living] == [2, 2]


def test_names_of_operations_that_were_not_waited_for_are_free_after_a_loss(crew: Crew) -> None:
    """An error has interrupted the script, so it has no handle to wait for. It starts its operations again."""

    def begin(member: Member) -> None:
        if member.identity != 3:
            hvd.allreduce_async(torch.ones(1), name="interrupted", op=hvd.Sum)

    def again(member: Member) -> float:
        return float(hvd.allreduce(torch.ones(1), name="interrupted", op=hvd.Sum))

    crew.all(metric)
    crew.all(begin)
    crew.network.kill(3)
    crew.all(metric)
    assert crew.all(again) == dict.fromkeys(range(3), 3.0)
