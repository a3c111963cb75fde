"""Small all-reduces that repeat, which ranks do in one shot, mixed with all other operations."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

import sordino.torch as hvd
from checks.agreement import raises
from checks.mismatches import expect_mismatch
from checks.reference import DTYPES, FOLDS, assert_equal, assert_reduced, values
from checks.registry import Seat, check
from sordino.errors import UsageError
from sordino.runtime.context import current, use

# Tensors of GPUs are not reduced in one shot.
ON_HOSTS = ("sim-1", "sim-2", "sim-3", "sim-4", "sim-5", "sim-3x1", "sim-4x2", "sim-5x2", "local-2", "mpi-3", "ucx-4x2")
REPEATS = 4
UNTIL_FAST = 100


def in_one_shot() -> int:
    """Return the number of operations that this rank has done in one shot."""
    return int(hvd.stats()["operations_in_one_shot"])


def fits(seat: Seat, tensor: torch.Tensor) -> bool:
    """Return whether turns carry an all-reduce of such a tensor: in host memory (not of a pretended GPU), and small.

    A rank that is alone takes any size.
    """
    world = current().world
    if seat.size == 1:
        return current().host_device is None
    one_node = len(set(world.nodes)) == 1 and world.shares_memory  # larger ones take two turns
    most = 512 * 1024 if one_node else 64 * 1024
    return current().host_device is None and tensor.numel() * tensor.element_size() <= most


@check(dtype=DTYPES, quick=ON_HOSTS)
def every_op_and_length(seat: Seat, dtype: torch.dtype) -> None:
    """Results have the same bits as an operation with agreement, with new numbers each time.

    A rank that is alone does all operations in one shot.
    """
    most = (2 if seat.size > 1 else 3) * REPEATS
    for label, op in FOLDS.items():
        for length in (1, 3, 24, 49, 1001, 8000, 8200):
            name, before = f"{label}.{length}", in_one_shot()
            for turn in range(REPEATS):
                inputs = [values(rank, length, dtype, seed=turn) for rank in range(seat.size)]
                mine = inputs[seat.rank].clone()
                assert hvd.allreduce_(mine, name=name, op=op) is mine
                assert_reduced(mine, op, inputs)
                agreed = hvd.allreduce(inputs[seat.rank], name=f"{name}.{turn}", op=op)
                assert_equal(mine, agreed)
                another = hvd.allreduce(inputs[seat.rank], name=name, op=op)
                assert_equal(mine, another)
                seat.same(f"{name}.{turn}", mine)
            done = in_one_shot() - before
            fast = fits(seat, mine)
            for _ in range(UNTIL_FAST):  # a rank that the machine has delayed declines; all ranks count the same
                if not fast or done:
                    break
                assert_equal(hvd.allreduce(inputs[seat.rank], name=name, op=op), agreed)
                done = in_one_shot() - before
            assert 0 < done < most + (seat.size == 1) if fast else done == 0, (name, done)


@check(length=(1, 16_000))
def factors_shapes_and_unnamed_ones(seat: Seat, length: int) -> None:
    inputs = [values(rank, (2, length // 2 or 1), torch.float32) for rank in range(seat.size)]
    for _ in range(REPEATS):
        mine = inputs[seat.rank].clone()
        hvd.allreduce_(mine, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.25)
        assert_reduced(mine, hvd.Sum, inputs, pre=2.0, post=0.25)
        flat = inputs[seat.rank].flatten().clone()  # the same call with another shape
        hvd.allreduce_(flat, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.25)
        assert_equal(flat.view_as(mine), mine)


@check(least=2)
def some_block_and_others_do_not(seat: Seat) -> None:
    """A rank that has started the operation asynchronously makes all others use the usual path as well."""
    for turn in range(3 * REPEATS):
        inputs = [values(rank, 100, torch.float64, seed=turn) for rank in range(seat.size)]
        mine = inputs[seat.rank].clone()
        if turn % 3 and (turn + seat.rank) % 2:
            hvd.synchronize(hvd.allreduce_async_(mine, name="x"))
        else:
            hvd.allreduce_(mine, name="x")
        assert_reduced(mine, hvd.Average, inputs)
        seat.same(f"{turn}", mine)


@check(least=2)
def in_different_orders(seat: Seat) -> None:
    """Of two operations, one is in flight while a rank waits for the other."""
    for turn in range(REPEATS):
        inputs = [values(rank, 50, torch.float32, seed=turn) for rank in range(seat.size)]
        first, second = inputs[seat.rank].clone(), inputs[seat.rank].clone()
        if seat.rank % 2:
            handle = hvd.allreduce_async_(second, name="b", op=hvd.Sum)
            hvd.allreduce_(first, name="a")
            hvd.synchronize(handle)
        else:
            hvd.allreduce_(first, name="a")
            hvd.allreduce_(second, name="b", op=hvd.Sum)
        assert_reduced(first, hvd.Average, inputs)
        assert_reduced(second, hvd.Sum, inputs)


@check(least=2)
def who_comes_late_is_waited_for(seat: Seat) -> None:
    """A late rank is waited for, even beyond the time after which the others switch to the usual path."""
    for turn in range(2 * REPEATS):
        if turn > 1 and seat.rank == turn % seat.size:
            time.sleep(0.13)
        result = torch.full((5,), float(seat.rank + turn))
        hvd.allreduce_(result, name="late", op=hvd.Sum)
        assert_equal(result, torch.full((5,), float(sum(range(seat.size)) + turn * seat.size)))


@check(least=2)
def differences_are_told_on_all_ranks(seat: Seat) -> None:
    odd = seat.rank == seat.last
    calls: dict[str, Callable[[], object]] = {
        "shape": lambda: hvd.allreduce_(torch.ones(4, 2) if odd else torch.ones(8), name="known"),
        "dtype": lambda: hvd.allreduce_(torch.ones(8, dtype=torch.float64 if odd else torch.float32), name="known"),
        "reduction": lambda: hvd.allreduce_(torch.ones(8), name="known", op=hvd.Max if odd else hvd.Average),
        "prescale": lambda: hvd.allreduce_(torch.ones(8), name="known", prescale_factor=2.0 if odd else 1.0),
    }
    for what, call in calls.items():
        for _ in range(REPEATS):
            assert_equal(hvd.allreduce_(torch.ones(8), name="known"), torch.ones(8))
        expect_mismatch(call, (what,))


@check()
def a_name_in_flight_is_refused(seat: Seat) -> None:
    for _ in range(REPEATS):
        hvd.allreduce_(torch.ones(3), name="taken")
    handle = hvd.allreduce_async(torch.ones(3), name="taken")
    raises(UsageError, "taken", hvd.allreduce_, torch.ones(3), name="taken")
    hvd.synchronize(handle)
    hvd.allreduce_(torch.ones(3), name="taken")


@check(least=2)
def among_some_and_after_a_join(seat: Seat) -> None:
    even = hvd.add_process_set(list(range(0, seat.size, 2)))
    for turn in range(REPEATS):
        if even.included():
            result = torch.full((2,), 1.0 + turn)
            hvd.allreduce_(result, name="some", op=hvd.Sum, process_set=even)
            assert_equal(result, torch.full((2,), (1.0 + turn) * even.size()))
        hvd.allreduce_(torch.ones(2), name="all")
    for turn in range(REPEATS):
        if seat.rank == 0 or turn < 2:  # the others contribute zeros meanwhile
            there = seat.size if turn < 2 else 1
            assert_equal(hvd.allreduce_(torch.ones(2), name="all", op=hvd.Sum), torch.full((2,), float(there)))
    hvd.join()
    for _ in range(REPEATS):
        assert_equal(hvd.allreduce_(torch.ones(2), name="all", op=hvd.Sum), torch.full((2,), float(seat.size)))
    hvd.remove_process_set(even)


@check(least=2, quick=ON_HOSTS)
def thousands_in_a_row(seat: Seat) -> None:
    """Ranks take turns at being ahead, and write their next input as soon as they have a result."""
    mine, expected = torch.empty(300), torch.empty(300)
    wrong = 0
    for turn in range(1500):
        mine.fill_(float(seat.rank * turn))
        hvd.allreduce_(mine, name="turn", op=hvd.Sum)
        expected.fill_(float(turn * seat.size * (seat.size - 1) // 2))
        wrong += not torch.equal(mine, expected)
    assert wrong == 0


@check(least=2)
def by_two_threads_of_each_rank(seat: Seat) -> None:
    """Two threads of each rank reduce; one at a time is in the middle of an operation."""
    context, wrong = current(), []

    def reduce(name: str, factor: float) -> None:
        with use(context):
            for turn in range(40):
                result = torch.full((9,), factor * turn)
                hvd.allreduce_(result, name=name, op=hvd.Sum)
                if not torch.equal(result, torch.full((9,), factor * turn * seat.size)):
                    wrong.append((name, turn))

    threads = [threading.Thread(target=reduce, args=(f"thread {k}", 1.0 + k)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
