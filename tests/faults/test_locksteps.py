"""The remaining ranks after a loss in the middle of an operation: their tensors, errors and order."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch
from crew import PATIENCE_S, Crew, Member, metric

import sordino.torch as hvd
from sordino.errors import OperationMismatch, PeerLost, SordinoError, UsageError
from sordino.runtime.context import use
from sordino.runtime.recovery.losses import go_on_after, together

ELEMENTS = 6_000_000


@pytest.fixture
def crew() -> Iterator[Crew]:
    torch.set_num_threads(1)
    made = Crew([0, 0, 1, 1])
    yield made
    made.end()


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


def test_blocking_operations_of_two_threads_are_refused(crew: Crew) -> None:
    """Ranks could not tell which of the two operations they have completed."""
    all_refused = threading.Barrier(4)  # until then the others wait for the last rank, in the middle of an operation

    def work(member: Member) -> str | None:
        if member.identity == 3:
            all_refused.wait(PATIENCE_S)
            metric(member)
            return None
        refusals: list[str] = []

        def other() -> None:
            with use(member.context):
                while not member.context.world.names_in_flight():
                    time.sleep(0.001)
                try:
                    metric(member)
                except UsageError as error:
                    refusals.append(str(error))
                all_refused.wait(PATIENCE_S)

        beside = threading.Thread(target=other)
        beside.start()
        metric(member)
        beside.join()
        return refusals[0] if refusals else None

    answers = crew.all(work)
    assert all("from one thread" in (answers[identity] or "") for identity in range(3))


def test_a_local_error_can_be_mended_and_tried_again(crew: Crew) -> None:
    """A rank that gave a wrong argument has not taken part. It tries again while the others wait."""

    def work(member: Member) -> float:
        if member.identity == 1:
            with pytest.raises(UsageError, match="root_rank"):
                hvd.broadcast_parameters({"w": torch.zeros(2)}, root_rank=9)
            with pytest.raises(SordinoError):
                hvd.allreduce(torch.zeros(2, dtype=torch.complex64))
        value = torch.full((2,), float(member.identity))
        hvd.broadcast_parameters({"w": value}, root_rank=2)
        return float(value[0])

    assert set(crew.all(work).values()) == {2.0}
    crew.network.kill(0)
    assert set(crew.all(work).values()) == {2.0}


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
    assert answer in {
        (4, 4),
        (4, 3),
        (3, 3),
    }  # the rank is lost after, between or before the two operations of metric()
    assert set(crew.all(work).values()) == {(3, 3)}


def test_what_one_has_and_another_has_not_begun_is_undone_and_done_again() -> None:
    torch.set_num_threads(1)
    crew = Crew([0, 0, 0])

    def work(member: Member) -> list[str]:
        done: list[str] = []
        lockstep = member.context.lockstep("test", hvd.global_process_set)
        together(
            member.context, hvd.global_process_set, lambda: done.append("done"), lambda: done.append("undone"), lockstep
        )
        return done

    def work_later(member: Member) -> list[str]:
        while not member.context.world.failed:
            time.sleep(0.001)
        go_on_after(member.context, hvd.HorovodInternalError("another rank is lost"))
        return work(member)

    try:
        crew.all(metric)
        crew.members[0].orders.put(work)
        time.sleep(0.2)  # it waits until the others have the result
        crew.network.kill(2)
        crew.members[1].orders.put(work_later)
        crew.members[2].orders.put(metric)
        assert crew.collect() == {0: ["done", "undone", "done"], 1: ["done"]}
    finally:
        crew.end()
