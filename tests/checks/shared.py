"""Tensors in shared memory: the direct path, alone and mixed with ordinary tensors."""

from __future__ import annotations

import torch

import sordino.torch as hvd
from checks.reference import DTYPES, FOLDS, assert_equal, assert_reduced, values
from checks.registry import Seat, check
from sordino.errors import UsageError


def in_shared(tensor: torch.Tensor) -> torch.Tensor:
    return hvd.shared_empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)


@check(dtype=DTYPES)
def every_op_in_place(seat: Seat, dtype: torch.dtype) -> None:
    for length in (0, 3, 70001):
        for label, op in FOLDS.items():
            inputs = [values(rank, length, dtype, seed=op) for rank in range(seat.size)]
            mine = in_shared(inputs[seat.rank])
            hvd.allreduce_(mine, op=op)
            assert_reduced(mine, op, inputs)
            seat.same(label, mine)


@check(who=("all", "first", "last", "even"))
def mixed_with_ordinary_ones(seat: Seat, who: str) -> None:
    chosen = {"all": True, "first": seat.rank == 0, "last": seat.rank == seat.last, "even": seat.rank % 2 == 0}[who]
    for length in (5, 9000, 200_003):
        inputs = [values(rank, length, torch.float32) for rank in range(seat.size)]
        mine = in_shared(inputs[seat.rank]) if chosen else inputs[seat.rank].clone()
        hvd.allreduce_(mine, prescale_factor=0.5)
        assert_reduced(mine, hvd.Average, inputs, pre=0.5)
        out = in_shared(inputs[seat.rank]) if chosen else inputs[seat.rank].clone()
        result = hvd.allreduce(out, op=hvd.Sum)
        assert_reduced(result, hvd.Sum, inputs)
        assert_equal(out, inputs[seat.rank])
        seat.same(str(length), mine, result)


@check()
def parts_of_a_shared_tensor(seat: Seat) -> None:
    """Each rank's part is at another offset; elements around it do not change."""
    whole = hvd.shared_empty(300_000, dtype=torch.float64)
    whole.fill_(-1.0)
    start, length = 16 * seat.rank + 7, 100_001
    inputs = [values(rank, length, torch.float64) for rank in range(seat.size)]
    mine = whole[start : start + length]
    mine.copy_(inputs[seat.rank])
    hvd.allreduce_(mine)
    assert_reduced(mine, hvd.Average, inputs)
    assert (whole[:start] == -1).all() and (whole[start + length :] == -1).all()
    seat.same("part", mine)
    every_second = whole[::2]
    every_second.fill_(float(seat.rank))
    hvd.allreduce_(every_second, op=hvd.Sum)
    assert (every_second == sum(range(seat.size))).all()


@check()
def groups_with_shared_ones(seat: Seat) -> None:
    inputs = [[values(rank, 20_000 + i, torch.float32, seed=i) for rank in range(seat.size)] for i in range(4)]
    mine = [in_shared(row[seat.rank]) if i % 2 else row[seat.rank].clone() for i, row in enumerate(inputs)]
    hvd.grouped_allreduce_(mine, op=hvd.Sum)
    for result, row in zip(mine, inputs):
        assert_reduced(result, hvd.Sum, row)
        seat.same("group", result)


@check()
def the_other_operations(seat: Seat) -> None:
    mine = in_shared(torch.full((seat.size * 10_000,), float(seat.rank)))
    gathered = hvd.allgather(mine)
    assert gathered.view(seat.size, -1).eq(torch.arange(float(seat.size))[:, None]).all()
    hvd.broadcast_(mine, root_rank=seat.last)
    assert (mine == seat.last).all()
    mine.fill_(float(seat.rank))
    assert hvd.alltoall(mine).view(seat.size, -1).eq(torch.arange(float(seat.size))[:, None]).all()
    assert (hvd.reducescatter(mine, op=hvd.Sum) == sum(range(seat.size))).all()


@check()
def freed_and_made_again(seat: Seat) -> None:
    """Peers must not use the mapping of freed memory: the new tensor may get the old address."""
    for turn in range(12):
        mine = hvd.shared_empty(20_000 + turn % 3, dtype=torch.float32).fill_(float(seat.rank + turn))
        hvd.allreduce_(mine, op=hvd.Sum)
        assert (mine == sum(rank + turn for rank in range(seat.size))).all(), turn
        del mine


@check()
def outlives_the_world(seat: Seat) -> None:
    mine = hvd.shared_empty(1000)
    hvd.allreduce_(mine)
    hvd.shutdown()
    mine.fill_(3.0)
    assert mine.sum() == 3000
    if seat.transport == "processes":
        hvd.init()


@check()
def share_moves_a_tensor(seat: Seat) -> None:
    parameter = torch.nn.Parameter(values(seat.rank, (100, 90), torch.float32))
    copy = parameter.detach().clone()
    assert not hvd.is_shared(parameter)
    assert hvd.share(parameter) is parameter
    assert hvd.is_shared(parameter) and hvd.share(parameter) is parameter
    assert_equal(parameter, copy)
    assert parameter.requires_grad
    (parameter * 2).sum().backward()
    assert (parameter.grad == 2).all()
    with torch.no_grad():
        hvd.allreduce_(parameter)
    assert_reduced(parameter, hvd.Average, [values(rank, (100, 90), torch.float32) for rank in range(seat.size)])


@check()
def shapes_and_dtypes(seat: Seat) -> None:
    assert hvd.shared_empty(3, 4).shape == (3, 4)
    assert hvd.shared_empty((3, 4)).shape == (3, 4)
    assert hvd.shared_empty([2, 0, 3]).shape == (2, 0, 3)
    assert hvd.shared_empty().shape == () and hvd.shared_empty(()).shape == ()
    assert hvd.shared_empty(torch.Size([5])).dtype == torch.get_default_dtype()
    for dtype in DTYPES:
        tensor = hvd.shared_empty(5, dtype=dtype)
        assert tensor.dtype == dtype and hvd.is_shared(tensor)
        assert_equal(tensor, torch.zeros(5).to(dtype))
    try:
        hvd.shared_empty(5, dtype=torch.complex64)
    except UsageError:
        pass
    else:
        raise AssertionError("complex tensors are not supported")


@check(least=2, who=("all", "none", "last"))
def parts_of_all_sizes(seat: Seat, who: str) -> None:
    """All-to-all and reduce-scatter of parts in a few chunks, some of them empty, from shared and ordinary memory."""
    shared = {"all": True, "none": False, "last": seat.rank == seat.last}[who]
    for rows in (300, 40_000, 200_003):
        splits = [[(giver + 2 * taker) % 3 * rows for taker in range(seat.size)] for giver in range(seat.size)]
        inputs = [values(rank, sum(row), torch.float32, seed=rows) for rank, row in enumerate(splits)]
        mine = in_shared(inputs[seat.rank]) if shared else inputs[seat.rank].clone()
        expected = torch.cat([one.split(row)[seat.rank] for one, row in zip(inputs, splits)])
        result, received = hvd.alltoall(mine, splits=splits[seat.rank])
        assert_equal(result, expected)
        assert received.tolist() == [row[seat.rank] for row in splits]
        whole = [values(rank, rows, torch.int32) for rank in range(seat.size)]
        mine = in_shared(whole[seat.rank]) if shared else whole[seat.rank].clone()
        part = hvd.reducescatter(mine, op=hvd.Sum)
        begin = seat.rank * (rows // seat.size) + min(seat.rank, rows % seat.size)
        assert_equal(part, torch.stack(whole).sum(0, dtype=torch.int32)[begin : begin + len(part)])
