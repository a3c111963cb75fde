"""Means of values that are sent encoded: conservation by error feedback, the same bits on all ranks, and failures."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

import sordino.torch as hvd
from checks.agreement import raises
from checks.registry import Seat, check
from sordino.errors import UsageError
from sordino.runtime.exchange.codecs import Codec, Float16, Int4, Int8, Sign, TopK, TwoBit
from sordino.runtime.exchange.compressed_mean import CompressedMean, SetTransfers
from sordino.runtime.process_set import global_process_set

CODECS = (Int8(), Int4(32), TwoBit(), Sign(), TopK(0.1, 128), TopK(0.1, 64, 32), TopK(0.1, 128, contributors=True))


def mean_of(codec: Codec, count: int, name: str = "mean") -> CompressedMean:
    return CompressedMean(count, codec, name, SetTransfers(name, global_process_set))


def values_of(rank: int, turn: int, count: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(100 * turn + rank))


@check(codec=CODECS, count=(1, 777), least=2)
def nothing_is_lost_for_good(seat: Seat, codec: Codec, count: int) -> None:
    """All that ranks have sent so far, and what is left in their residuals, is the sum of all that was to be sent."""
    if getattr(codec, "contributors", False):
        return  # its means are weighted by the number of contributors
    mean = mean_of(codec, count)
    sent, wanted = torch.zeros(count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
    for turn in range(6):
        mine = values_of(seat.rank, turn, count)
        wanted += sum(values_of(rank, turn, count).double() for rank in range(seat.size)) / seat.size
        result = mine.clone()
        mean.run(result)
        seat.same("mean", result)
        sent += result
    if not codec.feedback:
        assert (sent - wanted).abs().max() < (1.0 if isinstance(codec, Int4) else 0.1)
        return
    left = hvd.allreduce(mean.residuals[0][:count].double(), name="left")
    if len(mean.residuals) > 1:
        left += hvd.allgather(mean.residuals[1].double(), name="left of means")[:count]
    torch.testing.assert_close(sent + left, wanted, atol=1e-5, rtol=1e-5)
    assert (sent - wanted).abs().max() > 1e-3 or count == 1  # so the residuals were needed


@check(codec=(Float16(), Int8(32), TopK(1.0, 32, 32)), least=2)
def the_mean_is_near(seat: Seat, codec: Codec) -> None:
    count = 1000
    result = values_of(seat.rank, 0, count)
    mean_of(codec, count).run(result)
    wanted = sum(values_of(rank, 0, count).double() for rank in range(seat.size)) / seat.size
    tolerance = {Float16: 2e-3, Int8: 0.03, TopK: 1e-6}[type(codec)]
    torch.testing.assert_close(result.double(), wanted, atol=tolerance, rtol=0)


@check(least=2)
def means_over_those_that_sent(seat: Seat) -> None:
    """Each rank sends its largest value of a chunk. One that a single rank has sent is not divided."""
    codec = TopK(ratio=1 / 32, chunk=32, bits=32, contributors=True)
    values = torch.zeros(64)
    values[seat.rank], values[40] = seat.rank + 1.0, 2.0 * seat.rank + 1
    mean_of(codec, 64).run(values)
    wanted = torch.zeros(64)
    wanted[: seat.size] = torch.arange(1.0, seat.size + 1)
    wanted[40] = seat.size
    torch.testing.assert_close(values, wanted)


@check(codec=(Int8(), TopK(0.1, 128), Sign(32)), least=2)
def a_nan_is_a_nan_on_all_ranks(seat: Seat, codec: Codec) -> None:
    """And it does not stay in the residuals."""
    count, mean = 512, mean_of(codec, 512)
    values = values_of(seat.rank, 0, count)
    if seat.rank == 0:
        values[5] = float("nan")
    warned = pytest.warns(RuntimeWarning, match="NaN") if seat.rank == 0 and seat.transport == "processes" else None
    with warned or nullcontext():  # threads share the warnings of their process
        mean.run(values)
    seat.same("mean", values.nan_to_num(123.0))
    assert values[5].isnan() and values[codec.unit :].isfinite().all()
    again = values_of(seat.rank, 1, count)
    mean.run(again)
    assert again.isfinite().all()


@check()
def one_rank_and_what_does_not_fit(seat: Seat) -> None:
    mean = mean_of(Sign(), 10)
    raises(UsageError, "contiguous float32 (10,)", mean.run, torch.zeros(11))
    raises(UsageError, "contiguous float32 (10,)", mean.run, torch.zeros(10, dtype=torch.float64))
    if seat.size == 1:
        values = torch.randn(10)
        before = values.clone()
        mean.run(values)
        assert torch.equal(values, before)
