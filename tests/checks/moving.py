"""Broadcast, allgather, all-to-all and reducescatter: which rank gets what, for every dtype."""

from __future__ import annotations

import functools

import numpy as np
import torch

import sordino.torch as hvd
from checks.reference import DTYPES, INTEGERS, LENGTHS, assert_equal, assert_reduced, values
from checks.registry import Seat, check
from sordino.errors import UsageError
from sordino.plan import nodes_of_ranks


def rows(*parts: torch.Tensor) -> torch.Tensor:
    """Return the concatenated rows; unlike torch.cat, it supports all dtypes."""
    dtype = parts[0].dtype
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = integers[dtype.itemsize] if dtype in INTEGERS and dtype.itemsize > 1 else dtype
    return torch.cat([part.contiguous().view(bits) for part in parts]).view(dtype)


@check(least=2, quick=("sim-3x1", "sim-5x2", "mpi-3x1"))  # a chain needs three nodes
def what_is_long(seat: Seat) -> None:
    """A long broadcast goes in segments along a chain of nodes. In the long all-gather one rank contributes nothing."""
    long = [values(rank, 1_300_000, torch.float32) for rank in range(2)]
    for root in (0, seat.size - 1):
        mine = long[0] if seat.rank == root else long[1]
        assert_equal(hvd.broadcast(mine, root_rank=root), long[0])
    lengths = [0 if rank == 1 else 100_000 + rank for rank in range(seat.size)]
    parts = [values(rank, length, torch.float32) for rank, length in enumerate(lengths)]
    for _ in range(2):  # the second call gets memory that the first has used
        assert_equal(hvd.allgather(parts[seat.rank]), torch.cat(parts))


@check(dtype=DTYPES)
def broadcast_from_each_root(seat: Seat, dtype: torch.dtype) -> None:
    for root in range(seat.size):
        for length in LENGTHS:
            mine = values(seat.rank, length, dtype, wide=True)
            wanted = values(root, length, dtype, wide=True)
            result = hvd.broadcast(mine, root_rank=root)
            assert_equal(result, wanted)
            assert_equal(mine, values(seat.rank, length, dtype, wide=True))
            assert result.data_ptr() != mine.data_ptr() or not length
            assert hvd.broadcast_(mine, root_rank=root) is mine
            assert_equal(mine, wanted)


@check()
def broadcasts_under_way(seat: Seat) -> None:
    handles = []
    for root in range(seat.size):
        for length in (1, 50, 3_000_001 if root == 0 else 999):
            mine = values(seat.rank, length, torch.float32, seed=length)
            handles.append((root, length, hvd.broadcast_async(mine, root, name=f"out.{root}.{length}")))
            handles.append((root, length, hvd.broadcast_async_(mine.clone(), root, name=f"in.{root}.{length}")))
    for root, length, handle in handles:
        assert_equal(hvd.synchronize(handle), values(root, length, torch.float32, seed=length))


@check()
def broadcast_of_any_memory_order(seat: Seat) -> None:
    base = values(seat.rank, (6, 8), torch.float32)
    mine = base.t()[1:, ::2]
    wanted = values(seat.last, (6, 8), torch.float32).t()[1:, ::2]
    assert_equal(hvd.broadcast(mine, seat.last), wanted)
    hvd.broadcast_(mine, seat.last)
    assert_equal(mine, wanted)
    assert_equal(base[:, 0], values(seat.rank, (6, 8), torch.float32)[:, 0])
    scalar = torch.tensor(seat.rank, dtype=torch.bfloat16)
    assert hvd.broadcast(scalar, seat.last).item() == seat.last
    image = values(seat.rank, (2, 3, 4, 5), torch.float32).contiguous(memory_format=torch.channels_last)
    hvd.broadcast_(image, 0)
    assert image.is_contiguous(memory_format=torch.channels_last)
    assert_equal(image, values(0, (2, 3, 4, 5), torch.float32))


@check()
def broadcast_from_nobody(seat: Seat) -> None:
    for root in (seat.size, -1):
        try:
            hvd.broadcast(torch.ones(1), root_rank=root)
        except UsageError as error:
            assert str(root) in str(error)
        else:
            raise AssertionError(f"root {root} does not exist")


@check(dtype=DTYPES)
def allgather_of_equal_and_of_uneven_rows(seat: Seat, dtype: torch.dtype) -> None:
    for count in (lambda r: 4, lambda r: r, lambda r: 3 * (r % 2), lambda r: 0, lambda r: 20_000 if r == 0 else 1):
        for inner in ((), (3,), (2, 1, 5), (0,)):
            parts = [values(rank, (count(rank), *inner), dtype, wide=True) for rank in range(seat.size)]
            result = hvd.allgather(parts[seat.rank])
            assert_equal(result, rows(*parts))
            seat.same("gathered", result)


@check()
def allgather_of_scalars_and_views(seat: Seat) -> None:
    assert hvd.allgather(torch.tensor(seat.rank)).tolist() == list(range(seat.size))
    parts = [values(rank, (5, 4 + rank), torch.float32).t()[1:] for rank in range(seat.size)]
    assert_equal(hvd.allgather(parts[seat.rank]), torch.cat(parts))


@check()
def allgathers_in_groups_and_under_way(seat: Seat) -> None:
    table = [[values(r, (r + i, 2), dtype) for r in range(seat.size)] for i, dtype in enumerate(DTYPES)]
    mine = [parts[seat.rank] for parts in table]
    results = hvd.grouped_allgather(mine)
    assert isinstance(results, tuple)
    for result, parts in zip(results, table):
        assert_equal(result, rows(*parts))
    for result, parts in zip(hvd.synchronize(hvd.grouped_allgather_async(mine, name="g")), table):
        assert_equal(result, rows(*parts))
    handles = [hvd.allgather_async(tensor, name=f"a{i}") for i, tensor in enumerate(mine)]
    for handle, parts in zip(handles, table):
        assert_equal(hvd.synchronize(handle), rows(*parts))


def splits_of(size: int, pattern: str) -> list[list[int]]:
    """Return the number of rows that each rank (row of the result) sends to each rank (column)."""
    patterns = {
        "even": lambda source, target: 3,
        "growing": lambda source, target: source + 2 * target,
        "to one": lambda source, target: 5 if target == size - 1 else 0,
        "from one": lambda source, target: 5 if source == 0 else 0,
        "none": lambda source, target: 0,
        "large": lambda source, target: 30_000 * (source == target) + 10_000 + source,
    }
    return [[patterns[pattern](source, target) for target in range(size)] for source in range(size)]


@check(pattern=("even", "growing", "to one", "from one", "none", "large"))
def alltoall_with_splits(seat: Seat, pattern: str) -> None:
    table = splits_of(seat.size, pattern)
    for dtype in DTYPES if pattern == "growing" else (torch.float32, torch.uint8):
        for left_over in (0, 4):  # rows beyond the sum of the splits are not sent
            inputs = [values(r, (sum(table[r]) + left_over, 2), dtype, wide=True) for r in range(seat.size)]
            starts = [sum(table[r][: seat.rank]) for r in range(seat.size)]
            wanted = rows(*(inputs[r][starts[r] : starts[r] + table[r][seat.rank]] for r in range(seat.size)))
            received = [table[r][seat.rank] for r in range(seat.size)]
            for splits in (table[seat.rank], torch.tensor(table[seat.rank], dtype=torch.int32)):
                output, counts = hvd.alltoall(inputs[seat.rank], splits=splits)
                assert_equal(output, wanted)
                assert counts.dtype == torch.int32 and counts.tolist() == received
            output, counts = hvd.synchronize(hvd.alltoall_async(inputs[seat.rank], splits, name="async"))
            assert_equal(output, wanted)
            assert counts.tolist() == received


@check()
def alltoall_without_splits(seat: Seat) -> None:
    for count in (0, 1, 3):
        inputs = [values(rank, (count * seat.size, 3), torch.int64) for rank in range(seat.size)]
        wanted = torch.cat([tensor[seat.rank * count : (seat.rank + 1) * count] for tensor in inputs])
        output = hvd.alltoall(inputs[seat.rank])
        assert isinstance(output, torch.Tensor)
        assert_equal(output, wanted)
        pair = hvd.synchronize(hvd.alltoall_async(inputs[seat.rank], name="async"))
        assert_equal(pair[0], wanted)
        assert pair[1].tolist() == [count] * seat.size


@check()
def alltoall_twice_is_the_identity(seat: Seat) -> None:
    mine = values(seat.rank, (sum(range(seat.size)) + seat.size * seat.rank, 4), torch.float64)
    splits = [seat.rank + target for target in range(seat.size)]
    there, received = hvd.alltoall(mine, splits=splits)
    back, again = hvd.alltoall(there, splits=received)
    assert_equal(back, mine)
    assert again.tolist() == splits


@check()
def wrong_splits(seat: Seat) -> None:
    wrong = [
        (torch.ones(3), [1] * (seat.size + 1), "Number of entries"),
        (torch.ones(seat.size), [2] * seat.size, "greater than the first dimension"),
        (torch.ones(seat.size), [[1] * seat.size], "1D"),
        (torch.ones(seat.size), torch.ones(seat.size), "32-bit integer"),
        (torch.ones(seat.size), torch.ones(seat.size, dtype=torch.int64), "32-bit integer"),
        (torch.ones(seat.size), [0.9] * seat.size, "32-bit integer"),
        (torch.ones(seat.size), np.full(seat.size, 1.0), "32-bit integer"),
        (torch.ones(seat.size * 2), [2] * (seat.size - 1) + [-1], "negative"),
    ]
    if seat.size > 1:
        wrong.append((torch.ones(seat.size + 1), None, "not an even multiple"))
    for tensor, splits, text in wrong:
        try:
            hvd.alltoall(tensor, splits=splits)
        except UsageError as error:
            assert text in str(error), error
        else:
            raise AssertionError(f"splits {splits} are wrong")
    assert hvd.alltoall(torch.ones(seat.size)).sum() == seat.size
    assert hvd.alltoall(torch.ones(seat.size), splits=np.ones(seat.size, np.int64))[0].sum() == seat.size


def share_of(rank: int, size: int, count: int) -> slice:
    """Return a rank's share; the first ranks get the extra rows."""
    each, extra = divmod(count, size)
    start = rank * each + min(rank, extra)
    return slice(start, start + each + (rank < extra))


@check(dtype=DTYPES)
def reducescatter_of_any_number_of_rows(seat: Seat, dtype: torch.dtype) -> None:
    for count in (0, 1, seat.size, 2 * seat.size + 1, 1003):
        for inner in ((), (3, 2)):
            inputs = [values(rank, (count, *inner), dtype) for rank in range(seat.size)]
            mine = share_of(seat.rank, seat.size, count)
            for op in (hvd.Sum, hvd.Average):
                result = hvd.reducescatter(inputs[seat.rank], op=op)
                assert_reduced(result, op, [tensor[mine] for tensor in inputs])


@check(dtype=DTYPES)
def reducescatter_with_factors_and_other_folds(seat: Seat, dtype: torch.dtype) -> None:
    inputs = [values(rank, (31, 2), dtype) for rank in range(seat.size)]
    mine = [tensor[share_of(seat.rank, seat.size, 31)] for tensor in inputs]
    for op in (hvd.Sum, hvd.Average, hvd.Min, hvd.Max, hvd.Product):
        result = hvd.reducescatter(inputs[seat.rank], op=op, prescale_factor=0.5, postscale_factor=3.0)
        assert_reduced(result, op, mine, pre=0.5, post=3.0)


@check()
def reducescatter_is_a_part_of_allreduce(seat: Seat) -> None:
    mine = values(seat.rank, (50_001, 3), torch.float64)
    part = hvd.reducescatter(mine, op=hvd.Sum)
    seat.same("all parts", hvd.allgather(part))
    torch.testing.assert_close(hvd.allgather(part), hvd.allreduce(mine, op=hvd.Sum), atol=1e-12, rtol=1e-12)


@check()
def reducescatters_in_groups_and_under_way(seat: Seat) -> None:
    table = [[values(r, (7 + i, 2), dtype) for r in range(seat.size)] for i, dtype in enumerate(DTYPES)]
    own = [[tensor[share_of(seat.rank, seat.size, len(tensor))] for tensor in parts] for parts in table]
    mine = [parts[seat.rank] for parts in table]
    results = hvd.grouped_reducescatter(mine, op=hvd.Sum)
    asynchronous = hvd.synchronize(hvd.grouped_reducescatter_async(mine, op=hvd.Sum, name="g"))
    for result, other, parts in zip(results, asynchronous, own):
        assert_reduced(result, hvd.Sum, parts)
        assert_equal(result, other)
    handles = [hvd.reducescatter_async(tensor, name=f"r{i}", op=hvd.Average) for i, tensor in enumerate(mine)]
    for handle, parts in zip(handles, own):
        assert_reduced(hvd.synchronize(handle), hvd.Average, parts)


@check()
def reducescatter_refuses(seat: Seat) -> None:
    for tensor, op in ((torch.tensor(1.0), hvd.Sum), (torch.ones(seat.size), hvd.Adasum)):
        for call in (hvd.reducescatter, hvd.reducescatter_async):
            try:
                call(tensor, op=op)
            except UsageError:
                continue
            raise AssertionError("should be refused")
    try:
        hvd.grouped_reducescatter([torch.ones(seat.size), torch.tensor(1.0)])
    except UsageError:
        pass
    else:
        raise AssertionError("a scalar in the group")


@check(least=3)
def reducescatter_folds_in_rank_order(seat: Seat) -> None:
    """The order of the sum is fixed to the last bit: first within each node that shares memory, if any, then node by
    node."""
    inputs = [values(rank, (301, 5), torch.float32) for rank in range(seat.size)]
    nodes = nodes_of_ranks()
    by_node = [[one for one, where in zip(inputs, nodes) if where == node] for node in sorted(set(nodes))]
    found = hvd.allgather(hvd.reducescatter(inputs[seat.rank], op=hvd.Sum))
    add = functools.partial(functools.reduce, torch.add)
    assert found.equal(add(inputs)) or found.equal(add([add(node) for node in by_node]))
