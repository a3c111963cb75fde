"""Reductions of device memory against float64: one at a time, in groups and in bursts; and refused operations."""

from __future__ import annotations

import contextlib

import torch
from checks.mismatches import expect_mismatch
from checks.reference import DTYPES, FLOATS, FOLDS, assert_equal, assert_reduced, values
from rank_seat import Seat, check

import sordino.torch as hvd
from sordino.runtime.context import current

LENGTHS = (0, 1, 3, 1000, 70001)


def inputs(seat: Seat, shape: int | tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """Return the inputs of all ranks, on the host."""
    return [values(rank, shape, dtype, seed) for rank in range(seat.size)]


@check(each=DTYPES)
def reductions(seat: Seat, dtype: torch.dtype) -> None:
    for op in FOLDS.values():
        for length in LENGTHS:
            given = inputs(seat, length, dtype, seed=length)
            mine = seat.put(given[seat.rank])
            result = hvd.allreduce(mine, op=op)
            assert result.device == seat.device
            assert_reduced(result.cpu(), op, given)
            seat.same("result", result)
            assert_equal(mine.cpu(), given[seat.rank])
            assert hvd.allreduce_(mine, op=op) is mine
            assert_reduced(mine.cpu(), op, given)


@check(each=FLOATS)
def scaled(seat: Seat, dtype: torch.dtype) -> None:
    given = inputs(seat, (33, 7), dtype)
    for op in (hvd.Sum, hvd.Average, hvd.Max):
        result = hvd.allreduce(seat.put(given[seat.rank]), op=op, prescale_factor=0.5, postscale_factor=3.0)
        assert_reduced(result.cpu(), op, given, 0.5, 3.0)


@check()
def groups_of_dtypes(seat: Seat) -> None:
    kinds = [FLOATS[k % 4] for k in range(30)]
    given = [inputs(seat, (k * 7 % 50, 3), kind, seed=k) for k, kind in enumerate(kinds)]
    mine = [seat.put(one[seat.rank]) for one in given]
    for results in (hvd.grouped_allreduce(mine, op=hvd.Sum), hvd.grouped_allreduce_(mine, op=hvd.Sum)):
        for result, one in zip(results, given):
            assert_reduced(result.cpu(), hvd.Sum, one)


@check(each=(7, 200))
def bursts_are_fused(seat: Seat, count: int) -> None:
    """Each rank submits in another order."""
    given = [inputs(seat, 1 + k * 37 % 5000, torch.float32, seed=k) for k in range(count)]
    for _ in range(3):
        mine = [seat.put(one[seat.rank]) for one in given]
        handles = {}
        for k in range(count):
            index = (k + seat.rank * 3) % count
            handles[index] = hvd.allreduce_async_(mine[index], name=f"burst.{index}", op=hvd.Average)
        for index, handle in handles.items():
            assert hvd.synchronize(handle) is mine[index]
            assert_reduced(mine[index].cpu(), hvd.Average, given[index])


@check()
def large(seat: Seat) -> None:
    given = inputs(seat, 3_000_001, torch.float32)
    mine = seat.put(given[seat.rank])
    for offset in (0, 1):
        part = mine[offset:]
        assert_reduced(hvd.allreduce(part, op=hvd.Average).cpu(), hvd.Average, [one[offset:] for one in given])


@check()
def any_memory_order(seat: Seat) -> None:
    given = inputs(seat, (6, 8, 5), torch.float32)
    mine = seat.put(given[seat.rank])
    for cut in (lambda t: t.transpose(0, 2), lambda t: t[1:, ::2], lambda t: t[2, 3, 1]):
        assert_reduced(hvd.allreduce(cut(mine), op=hvd.Sum).cpu(), hvd.Sum, [cut(one) for one in given])
    view = mine[:, ::2]
    hvd.allreduce_(view, op=hvd.Sum)
    assert_reduced(view.cpu(), hvd.Sum, [one[:, ::2] for one in given])
    assert_equal(mine[:, 1::2].cpu(), given[seat.rank][:, 1::2])
    image = seat.put(values(seat.rank, (2, 3, 4, 5), torch.float32)).contiguous(memory_format=torch.channels_last)
    hvd.allreduce_(image, op=hvd.Sum)
    assert image.is_contiguous(memory_format=torch.channels_last)
    assert_reduced(image.cpu(), hvd.Sum, inputs(seat, (2, 3, 4, 5), torch.float32))


@check(each=(torch.float32, torch.bfloat16, torch.int32))
def shared_memory_in_place(seat: Seat, dtype: torch.dtype) -> None:
    for length in (1, 1000, 300_001):
        given = inputs(seat, length, dtype)
        mine = hvd.shared_empty(length, dtype=dtype, device=seat.device)
        assert mine.device == seat.device and not bool(mine.any())
        mine.copy_(given[seat.rank])
        handles = [hvd.allreduce_async_(mine, name=f"shared.{length}", op=hvd.Sum)]
        assert hvd.synchronize(handles[0]) is mine
        assert_reduced(mine.cpu(), hvd.Sum, given)
        seat.same("shared", mine)
        view = hvd.shared_empty(2, length, dtype=dtype, device=seat.device)[1]
        view.copy_(given[seat.rank])
        assert_reduced(hvd.allreduce_(view, op=hvd.Max).cpu(), hvd.Max, given)
    moved = hvd.share(seat.put(given[seat.rank]))
    assert moved.device == seat.device
    assert_reduced(hvd.allreduce_(moved, op=hvd.Sum).cpu(), hvd.Sum, given)


@check(least=2)
def adasum_is_the_hosts(seat: Seat) -> None:
    if seat.size & (seat.size - 1):
        return
    given = inputs(seat, 501, torch.float32)
    for mine, host in seat.twins(lambda: [hvd.allreduce(seat.put(given[seat.rank]), op=hvd.Adasum)]):
        torch.testing.assert_close(mine, host, atol=1e-5, rtol=1e-5)


@check(least=2)
def process_sets(seat: Seat) -> None:
    members = [0, seat.last] if seat.size > 2 else [0]
    odd = hvd.add_process_set(members)
    given = inputs(seat, 777, torch.float32)
    handle = hvd.allreduce_async(seat.put(given[seat.rank]), name="all", op=hvd.Sum)
    if odd.included():
        result = hvd.allreduce(seat.put(given[seat.rank]), op=hvd.Sum, process_set=odd)
        assert_reduced(result.cpu(), hvd.Sum, [given[rank] for rank in members])
    assert_reduced(hvd.synchronize(handle).cpu(), hvd.Sum, given)
    assert hvd.remove_process_set(odd)


@check(least=2)
def joined_ranks_stand_for_zeros(seat: Seat) -> None:
    given = inputs(seat, 777, torch.float32)
    if seat.rank > 0:
        mine = seat.put(given[seat.rank])
        for op in (hvd.Sum, hvd.Average):
            assert_reduced(hvd.allreduce(mine, op=op, name=f"j{op}").cpu(), op, given[1:], size=seat.size)
    assert hvd.join() >= 0


@check()
def gradients_of_reductions(seat: Seat) -> None:
    given = inputs(seat, (4, 3), torch.float64)
    mine = seat.put(given[seat.rank]).requires_grad_()
    (hvd.allreduce(mine, op=hvd.Sum) * (seat.rank + 1)).sum().backward()
    assert mine.grad is not None and mine.grad.device == seat.device
    wanted = torch.full((4, 3), seat.size * (seat.size + 1) / 2, dtype=torch.float64)
    torch.testing.assert_close(mine.grad.cpu(), wanted)


@check(least=2)
def host_tensors_do_not_meet_device_tensors(seat: Seat) -> None:
    for odd in (0, seat.last):
        with seat.on_host() if seat.rank == odd else contextlib.nullcontext():
            tensor = seat.put(torch.ones(100))
            text = expect_mismatch(lambda tensor=tensor: hvd.allreduce(tensor, name="m"), ("allreduce.m", "rank 0"))
            seat.same("mismatch", text)
            expect_mismatch(lambda tensor=tensor: hvd.allgather(tensor, name="m"), ("allgather.m",))
        ones = hvd.allreduce(seat.put(torch.ones(10)), name="m", op=hvd.Sum)
        assert ones.tolist() == [seat.size] * 10


@check(least=2)
def mismatches_leave_the_input_alone(seat: Seat) -> None:
    mine = seat.put(torch.arange(5.0 + seat.rank))
    expect_mismatch(lambda: hvd.allreduce_(mine, name="m"), ("shape",))
    assert mine.tolist() == list(range(5 + seat.rank))
    bystander = seat.put(torch.ones(500))
    assert hvd.allreduce(bystander, op=hvd.Sum).tolist() == [seat.size] * 500


@check()
def both_kinds_of_memory_side_by_side(seat: Seat) -> None:
    """Operations on the host's memory are mixed with operations on the device's."""
    given = inputs(seat, 5000, torch.float32)
    handles = []
    for k in range(20):
        with seat.on_host() if k % 2 else contextlib.nullcontext():
            handles.append(hvd.allreduce_async(seat.put(given[seat.rank]), name=f"side.{k}", op=hvd.Sum))
    for k, handle in enumerate(handles):
        result = hvd.synchronize(handle)
        assert result.device == (seat.device if k % 2 == 0 else torch.device("cpu"))
        assert_reduced(result.cpu(), hvd.Sum, given)


@check()
def the_expected_way(seat: Seat) -> None:
    tensor = seat.put(torch.ones(5000))
    with seat.goes(seat.reduces):
        hvd.allreduce(tensor)
        hvd.allreduce_(tensor)
        hvd.grouped_allreduce([tensor, tensor])
    shared = hvd.shared_empty(5000, device=seat.device)
    with seat.goes(seat.reduces):
        hvd.allreduce_(shared)
    with seat.goes(seat.moves):
        hvd.broadcast_(tensor, 0)
        hvd.allgather(tensor)
        hvd.alltoall(seat.put(torch.ones(2 * seat.size)))
        hvd.reducescatter(tensor)
    if seat.gpu is None:
        before = dict(current().world.gpu_operations)
        hvd.allreduce(torch.ones(10))
        assert dict(current().world.gpu_operations) == before, "the host's tensors went by the GPU"
