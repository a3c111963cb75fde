"""Means of values that are sent encoded: conservation by error feedback, the same bits on all ranks, and failures."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

import sordino.torch as hvd
from checks.agreement import raises
from checks.registry import Seat, check
from checks.training import Twins
from sordino.algorithms import DPSGD, AllReduce
from sordino.codecs import Codec, Float16, Int4, Int8, Sign, TopK, TwoBit
from sordino.errors import ConfigurationMismatch, NonFinite, UsageError
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


@check(codec=("int8", "float16", TopK(1.0, 32, 32)), set_to_none=(True, False), dtype=(torch.float32, torch.float64))
def gradients(seat: Seat, codec: Codec | str, set_to_none: bool, dtype: torch.dtype) -> None:
    twins = Twins(seat, dtype=dtype, compression=codec)
    for _ in range(4):
        twins.train(1, set_to_none=set_to_none)
        seat.same("parameters", *twins.model.parameters())
    twins.check(1e-5 if isinstance(codec, TopK) else 2e-2)


@check(codec=(TwoBit(), Sign(32), TopK(0.1, 32)), least=2)
def what_a_step_has_lost_is_sent_later(seat: Seat, codec: Codec) -> None:
    """Plain SGD adds up gradients, so parameters stay as near to exact ones as after the first step."""
    twins = Twins(seat, make=lambda model: torch.optim.SGD(model.parameters(), lr=1.0), compression=codec)
    start = [parameter.detach().clone() for parameter in twins.model.parameters()]
    for _ in range(30):
        for mine, parameter in zip(twins.model.parameters(), twins.twin.parameters()):
            generator = torch.Generator().manual_seed(parameter.numel())
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            mine.grad = parameter.grad * (1 + 0.1 * seat.rank) / (1 + 0.05 * (seat.size - 1))
        twins.step()
        seat.same("parameters", *twins.model.parameters())
    for mine, exact, first in zip(twins.model.parameters(), twins.twin.parameters(), start):
        moved, wanted = mine - first, exact - first
        assert (moved - wanted).norm() < 0.35 * wanted.norm()


@check(least=2)
def gradients_that_some_ranks_lack(seat: Seat) -> None:
    """A parameter without a gradient on some rank gets the mean; one without on all ranks keeps None."""
    parameters = [torch.nn.Parameter(torch.zeros(5)) for _ in range(3)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), compression=Float16())
    for _ in range(2):
        optimizer.zero_grad()
        parameters[0].grad = torch.ones(5)
        if seat.rank == 0:
            parameters[1].grad = torch.full((5,), float(seat.size))
        optimizer.synchronize()
        assert torch.equal(parameters[1].grad, torch.ones(5)) and parameters[2].grad is None
        with optimizer.skip_synchronize():
            optimizer.step()
    assert torch.equal(parameters[1].detach(), torch.full((5,), -2.0))


@check(least=2)
def a_gradient_that_is_not_finite(seat: Seat) -> None:
    parameter = torch.nn.Parameter(torch.zeros(64))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), compression="int8", check_finite=True)
    parameter.grad = torch.ones(64)
    if seat.rank == seat.last:
        parameter.grad[7] = float("inf")
    raises(NonFinite, "", optimizer.step)
    assert not parameter.detach().any()
    parameter.grad = torch.ones(64)
    optimizer.step()
    assert torch.allclose(parameter.detach(), -torch.ones(64))


@check()
def what_does_not_fit_a_codec(seat: Seat) -> None:
    model = torch.nn.Linear(2, 2)

    def wrap(**options: object) -> None:
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **options)

    raises(UsageError, "always averages", wrap, compression=Int8(), op=hvd.Sum)
    raises(UsageError, "always averages", wrap, compression=Int8(), gradient_predivide_factor=2.0)
    raises(UsageError, "double_buffering", wrap, compression="int8", algorithm=AllReduce(double_buffering=True))
    raises(UsageError, "compression= has no effect", wrap, compression="int8", algorithm=DPSGD())
    raises(UsageError, "no such codec", wrap, compression="int9")
    raises(UsageError, "must be Compression.none", wrap, compression=8)
    if seat.size > 1:
        codec = Int8(64) if seat.rank == 0 else Int8(32)
        raises(ConfigurationMismatch, "compression", wrap, compression=codec)
