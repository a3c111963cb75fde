"""Sparse all-reduce: the sum of all ranks' entries."""

from __future__ import annotations

import pytest
import torch

import sordino.torch as hvd
from checks.agreement import raises
from checks.reference import values
from checks.registry import Seat, check
from sordino.errors import OperationMismatch, UsageError


def sparse_of(rank: int, entries: int, columns: int = 2) -> torch.Tensor:
    indices = torch.tensor([[(rank * 3 + 2 * i) % 10 for i in range(entries)]], dtype=torch.int64).view(1, -1)
    return torch.sparse_coo_tensor(indices, values(rank, (entries, columns), torch.float64), (10, columns))


@check(least=2)
def one_that_fails_frees_its_name(seat: Seat) -> None:
    good = sparse_of(seat.rank, 2)
    with pytest.raises(UsageError, match="complex"):
        hvd.sparse_allreduce_async(good.to(torch.complex128), name="s", op=hvd.Sum)
    other = good.to(torch.float32) if seat.rank == 0 else good
    raises(OperationMismatch, "dtype", hvd.sparse_allreduce_async(other, name="s", op=hvd.Sum))
    total = hvd.sparse_allreduce_async(good, name="s", op=hvd.Sum)().to_dense()
    torch.testing.assert_close(total, sum(sparse_of(rank, 2).to_dense() for rank in range(seat.size)))


@check()
def equals_the_dense_one(seat: Seat) -> None:
    for entries in (lambda r: 3, lambda r: r, lambda r: 0, lambda r: 9 if r == 0 else 0):
        inputs = [sparse_of(rank, entries(rank)).to_dense() for rank in range(seat.size)]
        for op, dense in ((hvd.Sum, sum(inputs)), (hvd.Average, sum(inputs) / seat.size)):
            finish = hvd.sparse_allreduce_async(sparse_of(seat.rank, entries(seat.rank)), name="s", op=op)
            result = finish()
            assert result.is_sparse and result.shape == (10, 2) and result.dtype == torch.float64
            torch.testing.assert_close(result.to_dense(), dense, atol=1e-12, rtol=1e-12)
            seat.same("dense", result.to_dense())


@check()
def many_under_way_with_two_sparse_dimensions(seat: Seat) -> None:
    def make(rank: int, i: int) -> torch.Tensor:
        return torch.sparse_coo_tensor([[rank % 3, 2], [i % 4, 3]], [1.0 + rank, 2.0], (3, 4))

    waiting = [hvd.sparse_allreduce_async(make(seat.rank, i), name=str(i), op=hvd.Average) for i in range(20)]
    for i, finish in enumerate(waiting):
        dense = sum(make(rank, i).to_dense() for rank in range(seat.size)) / seat.size
        torch.testing.assert_close(finish().to_dense(), dense)


@check()
def averages_of_integers_are_quotients_of_sums(seat: Seat) -> None:
    """Averages are those of dense tensors, also if entries are smaller than the number of ranks, or above 2^24."""
    mine = torch.sparse_coo_tensor([[0, 1, 2]], [seat.rank + 1, -1, 2**25 + 1 + seat.rank], (4,))
    result = hvd.sparse_allreduce_async(mine, name="s", op=hvd.Average)()
    assert result.dtype == torch.int64
    assert torch.equal(result.to_dense(), hvd.allreduce(mine.to_dense(), op=hvd.Average))


@check()
def other_ops_are_refused(seat: Seat) -> None:
    raises(UsageError, "Sum", hvd.sparse_allreduce_async, sparse_of(0, 1), name="x", op=hvd.Min)
    raises(UsageError, "sparse", hvd.allreduce, sparse_of(0, 1))


@check(least=3)
def within_a_process_set(seat: Seat) -> None:
    some = hvd.add_process_set([0, seat.last])
    if some.included():
        result = hvd.sparse_allreduce_async(sparse_of(seat.rank, 2), name="s", op=hvd.Average, process_set=some)()
        dense = (sparse_of(0, 2).to_dense() + sparse_of(seat.last, 2).to_dense()) / 2
        torch.testing.assert_close(result.to_dense(), dense)
    hvd.remove_process_set(some)
