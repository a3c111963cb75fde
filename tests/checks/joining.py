"""join(): a rank without data contributes zeros until all ranks have joined."""

from __future__ import annotations

import torch

import sordino.torch as hvd
from checks.mismatches import expect_mismatch
from checks.reference import DTYPES, assert_reduced, values
from checks.registry import Seat, check


def turn_of(seat: Seat, backwards: bool) -> int:
    """Return the number of operations of this rank before it joins. It differs between ranks, so the order of joins is
    fixed."""
    return seat.last - seat.rank if backwards else seat.rank


@check(backwards=(False, True))
def zeros_for_those_who_joined(seat: Seat, backwards: bool) -> None:
    for round_number in range(3):
        direction = backwards ^ (round_number % 2 == 1)
        steps = [seat.last - rank if direction else rank for rank in range(seat.size)]
        for step in range(steps[seat.rank]):
            for dtype in (torch.float64, torch.int32, torch.bool):
                real = [values(rank, 100, dtype, seed=step) for rank in range(seat.size)]
                inputs = [
                    tensor if steps[rank] > step else torch.zeros_like(tensor) for rank, tensor in enumerate(real)
                ]
                for op in (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product):
                    assert_reduced(hvd.allreduce(real[seat.rank], op=op, name=f"{dtype}.{op}"), op, inputs)
        last = hvd.join()
        assert last == (0 if direction else seat.last)
        seat.same("last", last)


@check(least=2)
def with_factors_in_groups_and_under_way(seat: Seat) -> None:
    if seat.rank > 0:
        table = [[values(rank, 50 + i, dtype, seed=i) for rank in range(seat.size)] for i, dtype in enumerate(DTYPES)]
        for op in (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product):
            factors = {"prescale_factor": 2.0, "postscale_factor": 0.5}
            handle = hvd.grouped_allreduce_async([row[seat.rank] for row in table], op=op, name=f"{op}", **factors)
            for result, row in zip(hvd.synchronize(handle), table):
                inputs = [torch.zeros_like(row[0]), *row[1:]]
                assert_reduced(result, op, inputs, pre=2.0, post=0.5)
    hvd.join()


@check(least=2)
def large_and_shared_tensors(seat: Seat) -> None:
    if seat.rank != seat.last:
        for length in (70_001, 300_000):
            inputs = [values(rank, length, torch.float32) for rank in range(seat.size)]
            inputs[-1] = torch.zeros(length)
            for op in (hvd.Average, hvd.Max):
                mine = inputs[seat.rank].clone()
                hvd.allreduce_(mine, op=op, name="ordinary")
                assert_reduced(mine, op, inputs)
                shared = hvd.shared_empty(length).copy_(inputs[seat.rank])
                hvd.allreduce_(shared, op=op, name="shared")
                assert_reduced(shared, op, inputs)
    hvd.join()
    # Slots of ranks that left out operations are in step again.
    inputs = [values(rank, 200_000, torch.float64) for rank in range(seat.size)]
    result = hvd.allreduce(inputs[seat.rank], op=hvd.Sum)
    assert_reduced(result, hvd.Sum, inputs)
    seat.same("after", result)


@check(least=2)
def adasum_with_a_joined_rank(seat: Seat) -> None:
    """Zeros do not change the result of Adasum."""
    if seat.rank > 0:
        mine = torch.full((10,), 3.0, dtype=torch.float64)
        torch.testing.assert_close(hvd.allreduce(mine, op=hvd.Adasum, name="a"), mine)
    hvd.join()


@check(least=2)
def what_needs_everybody_raises_on_the_others(seat: Seat) -> None:
    """Zeros can stand for a joined rank's numbers, but nothing can stand for its rows."""
    if seat.rank != 0:
        calls = {
            "from the joined": lambda name: hvd.broadcast(torch.ones(2), 0, name=name),
            "from another": lambda name: hvd.broadcast(torch.ones(2), 1, name=name),
            "rows": lambda name: hvd.allgather(torch.ones(2), name=name),
            "groups of rows": lambda name: hvd.grouped_allgather([torch.ones(2)] * 2, name=name),
            "exchange": lambda name: hvd.alltoall(torch.ones(seat.size), name=name),
            "parts": lambda name: hvd.reducescatter(torch.ones(seat.size), name=name),
        }
        for name, call in calls.items():
            expect_mismatch(lambda call=call, name=name: call(name), (name, "joined"))
        hvd.barrier()  # does not wait for ranks that have joined
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="s").item() == seat.last
    hvd.join()
    assert hvd.alltoall(torch.arange(seat.size)).tolist() == [seat.rank] * seat.size


@check(least=2)
def mismatches_among_those_who_are_left(seat: Seat) -> None:
    if seat.rank != seat.last and seat.size > 2:
        expect_mismatch(lambda: hvd.allreduce(torch.ones(1 + seat.rank), name="x"), ("shape",))
    hvd.join()


@check()
def everybody_at_once_many_times(seat: Seat) -> None:
    for _ in range(15):
        last = hvd.join()
        assert 0 <= last < seat.size
        seat.same("last", last)
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == seat.size


@check(least=2)
def operations_of_one_rank_alone(seat: Seat) -> None:
    if seat.rank == seat.last:
        for i in range(5):
            result = hvd.allreduce(torch.full((3,), 6.0), name=f"{i}")
            torch.testing.assert_close(result, torch.full((3,), 6.0 / seat.size))
    assert hvd.join() == seat.last


@check(least=3)
def join_while_a_process_set_works(seat: Seat) -> None:
    """join() concerns all ranks. Operations of a smaller process set continue, also if one of its members has
    joined."""
    pair = hvd.add_process_set([0, 1])
    if seat.rank < 2:
        for _ in range(3):
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=pair).item() == 2
    hvd.join()
    assert hvd.remove_process_set(pair)
