"""Means of values that are sent encoded: conservation by error feedback, the same bits on all ranks, and failures."""

from __future__ import annotations

import copy

import torch

import sordino.torch as hvd
from checks.agreement import raises
from checks.diloco import Layers, loss_of, same_parameters, sgd, train, train_resumed
from checks.registry import Seat, check
from checks.training import Twins
from sordino.algorithms import DPSGD, AllReduce, DiLoCo, SparseLoCo
from sordino.codecs import Codec, Float16, Int4, Int8, Sign, TopK, TwoBit
from sordino.errors import ConfigurationMismatch, NonFinite, UsageError
from sordino.runtime.exchange.compressed_mean import CompressedMean
from sordino.runtime.exchange.transfers import SetTransfers
from sordino.runtime.process_set import global_process_set

CODECS = (Int8(), Int4(32), TwoBit(), Sign(), TopK(0.1, 128), TopK(0.1, 64, 32), TopK(0.1, 128, contributors=True))


def mean_of(codec: Codec, count: int, name: str = "mean") -> CompressedMean:
    return CompressedMean(count, codec, name, SetTransfers(name, global_process_set))


def average(mean: CompressedMean, values: torch.Tensor) -> None:
    """Replace values by their mean, and warn if they were not finite."""
    mean.begin(values)
    values.copy_(mean.finish())
    mean.report()


def values_of(rank: int, turn: int, count: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(100 * turn + rank))


@check(codec=CODECS, count=(1, 777), least=2)
def nothing_is_lost_for_good(seat: Seat, codec: Codec, count: int) -> None:
    """The values sent so far and the residuals add up to all values that were to be sent."""
    if getattr(codec, "contributors", False):
        return  # its means are weighted by the number of contributors
    mean = mean_of(codec, count)
    sent, wanted = torch.zeros(count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
    for turn in range(6):
        mine = values_of(seat.rank, turn, count)
        wanted += sum(values_of(rank, turn, count).double() for rank in range(seat.size)) / seat.size
        result = mine.clone()
        average(mean, result)
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


@check(count=(1, 5, 130, 700), least=2)
def the_scale_of_a_block_that_is_not_full(seat: Seat, count: int) -> None:
    """The scale is the mean magnitude of the block's own values, both for this rank's values and for the mean."""
    odd = torch.arange(count) % 2 == 1
    values = torch.where(odd & torch.tensor(seat.rank > 0), -2.0, 2.0)  # equal magnitudes, so signs lose nothing
    average(mean_of(Sign(), count), values)
    mean = torch.where(odd, abs(4 / seat.size - 2), 2.0).double()
    wanted = torch.cat([block.mean().expand_as(block) for block in mean.split(128)])
    torch.testing.assert_close(values.double().abs(), wanted, atol=1e-6, rtol=0)


@check(codec=(Float16(), Int8(32), TopK(1.0, 32, 32)), least=2)
def the_mean_is_near(seat: Seat, codec: Codec) -> None:
    count = 1000
    result = values_of(seat.rank, 0, count)
    average(mean_of(codec, count), result)
    wanted = sum(values_of(rank, 0, count).double() for rank in range(seat.size)) / seat.size
    tolerance = {Float16: 2e-3, Int8: 0.03, TopK: 1e-6}[type(codec)]
    torch.testing.assert_close(result.double(), wanted, atol=tolerance, rtol=0)


@check(least=2)
def means_over_those_that_sent(seat: Seat) -> None:
    """Each rank sends its largest value of a chunk. A value that only one rank has sent is not divided."""
    codec = TopK(ratio=1 / 32, chunk=32, bits=32, contributors=True)
    values = torch.zeros(64)
    values[seat.rank], values[40] = seat.rank + 1.0, 2.0 * seat.rank + 1
    average(mean_of(codec, 64), values)
    wanted = torch.zeros(64)
    wanted[: seat.size] = torch.arange(1.0, seat.size + 1)
    wanted[40] = seat.size
    torch.testing.assert_close(values, wanted)


@check(codec=(Int8(), TopK(0.1, 128), Sign(32)), least=2)
def a_nan_is_a_nan_on_all_ranks(seat: Seat, codec: Codec) -> None:
    """A NaN of one rank is a NaN on all ranks, and does not stay in the residuals."""
    count, mean = 512, mean_of(codec, 512)
    values = values_of(seat.rank, 0, count)
    if seat.rank == 0:
        values[5] = float("nan")
    with seat.warned("NaN", when=seat.rank == 0):
        average(mean, values)
    seat.same("mean", values.nan_to_num(123.0))
    assert values[5].isnan() and values[codec.unit :].isfinite().all()
    again = values_of(seat.rank, 1, count)
    average(mean, again)
    assert again.isfinite().all()


@check()
def one_rank_and_what_does_not_fit(seat: Seat) -> None:
    mean = mean_of(Sign(), 10)
    raises(UsageError, "contiguous float32 (10,)", mean.begin, torch.zeros(11))
    raises(UsageError, "contiguous float32 (10,)", mean.begin, torch.zeros(10, dtype=torch.float64))
    if seat.size == 1:
        values = torch.randn(10)
        before = values.clone()
        average(mean, values)
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
    """A parameter without a gradient on some ranks gets the mean; a parameter without one on all ranks keeps None."""
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
    for setting in ("Int8(block=64.0)", "Sign(block=-64)", "TopK(chunk=1e3)", "TopK(bits=True)", "PowerSGD(rank='2')"):
        raises(UsageError, "must be an integer, at least 1", wrap, compression=setting)
    for setting in ("TopK(ratio='a')", "TopK(ratio=None)", "TopK(ratio=2)"):
        raises(UsageError, "must be above 0, and at most 1", wrap, compression=setting)
    raises(UsageError, "no such codec", wrap, compression="int9")
    raises(UsageError, "must be Compression.none", wrap, compression=8)
    if seat.size > 1:
        codec = Int8(64) if seat.rank == 0 else Int8(32)
        raises(ConfigurationMismatch, "compression", wrap, compression=codec)


# ---- outer gradients ------------------------------------------------------------------------------------------------

EXACT = TopK(ratio=1.0, chunk=32, bits=32)


@check(least=2, shape=((4, 1, 0), (6, 3, 0), (6, 2, 2)))
def outer_gradients(seat: Seat, shape: tuple[int, int, int]) -> None:
    """A lossless codec only rounds to float32, also with fragments and with overlap."""
    interval, fragments, overlap = shape
    given = {"outer_lr": 0.7, "outer_momentum": 0.9, "fragments": fragments, "overlap": overlap}
    models = [Layers() for _ in range(2)]
    for model, codec in zip(models, (None, EXACT)):
        algorithm = DiLoCo(interval=interval, compression=codec, **given)
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), algorithm=algorithm)
        train(seat, model, optimizer, range(2 * interval + 3))
        if codec is not None:
            seat.same("outer", *optimizer.state_dict()["sordino"]["outer"])
    for one, other in zip(*(model.parameters() for model in models)):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


@check(least=2, codec=("int8", Sign(32), TopK(0.1, 128)), overlap=(0, 1))
def outer_parameters_are_equal_on_all_ranks(seat: Seat, codec: Codec | str, overlap: int) -> None:
    model = Layers(dtype=torch.float32)
    algorithm = DiLoCo(interval=2, outer_momentum=0.5, compression=codec, overlap=overlap)
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), algorithm=algorithm)
    for turn in range(7):
        train(seat, model, optimizer, range(turn, turn + 1))
        with optimizer.outer_parameters():
            seat.same("outer", *model.parameters())


@check(least=2, overlap=(0, 1))
def a_checkpoint_with_a_codec(seat: Seat, overlap: int) -> None:
    """With a codec without residuals, training that resumes is the same, bit for bit."""
    algorithm = DiLoCo(interval=3, outer_momentum=0.9, compression=Int8(32), overlap=overlap)

    def wrapped(model: torch.nn.Module) -> hvd.DistributedOptimizer:
        return hvd.DistributedOptimizer(sgd(model), model.named_parameters(), algorithm=algorithm)

    model = Layers(dtype=torch.float32)
    optimizer = wrapped(model)
    train(seat, model, optimizer, range(6))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(seat, model, optimizer, range(6, 11))
    other, _ = train_resumed(seat, wrapped, saved, range(6, 11), torch.float32)
    assert same_parameters(model, other)


@check(least=2)
def one_rank_alone_asks_for_its_state(seat: Seat) -> None:
    """One rank may ask for its state while an encoded mean is in flight and the other ranks do not answer."""
    model = Layers(dtype=torch.float32)
    algorithm = DiLoCo(interval=3, compression=Int8(32), overlap=2)
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), algorithm=algorithm)
    train(seat, model, optimizer, range(4))
    if seat.rank == 0:
        pending = optimizer.state_dict()["sordino"]["pending"]
        assert list(pending) == [0] and pending[0][0].any()
    train(seat, model, optimizer, range(4, 8))
    seat.same("outer", *optimizer.state_dict()["sordino"]["outer"])


class SparseReference:
    """SparseLoCo by its formulas, in float64, with exact values: all workers on one rank."""

    def __init__(self, size: int, chunk: int, kept: int, rate: float, decay: float) -> None:
        self.chunk, self.kept, self.rate, self.decay = chunk, kept, rate, decay
        self.workers = [(one := Layers(), sgd(one)) for _ in range(size)]
        self.outer = torch.nn.utils.parameters_to_vector(Layers().parameters()).detach()
        self.rests = [torch.zeros_like(self.outer) for _ in range(size)]

    def step(self, turn: int, outer_step: bool) -> None:
        for rank, (model, optimizer) in enumerate(self.workers):
            optimizer.zero_grad()
            loss_of(model, rank, turn).backward()
            optimizer.step()
        if outer_step:
            self.outer_step()

    def outer_step(self) -> None:
        total, given = torch.zeros_like(self.outer), torch.zeros_like(self.outer)
        for (model, _), rest in zip(self.workers, self.rests):
            own = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
            rest.mul_(self.decay).add_(own - self.outer)
            for begin in range(0, len(rest), self.chunk):
                part = rest[begin : begin + self.chunk]
                places = begin + part.abs().topk(min(self.kept, len(part))).indices
                total[places] += rest[places]
                given[places] += 1
                rest[places] = 0
        self.outer += self.rate * total / given.clamp(min=1)
        for model, _ in self.workers:
            torch.nn.utils.vector_to_parameters(self.outer.clone(), model.parameters())


@check(least=2, decay=(0.95, 0.5), rate=(0.8, 1.0))
def sparse_loco(seat: Seat, decay: float, rate: float) -> None:
    codec = TopK(ratio=1 / 8, chunk=32, bits=32, contributors=True)
    model = Layers()
    algorithm = SparseLoCo(interval=2, outer_lr=rate, decay=decay, compression=codec)
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), algorithm=algorithm)
    reference = SparseReference(seat.size, 32, 4, rate, decay)
    for turn in range(7):
        train(seat, model, optimizer, range(turn, turn + 1))
        reference.step(turn, turn % 2 == 1)
        for mine, wanted in zip(model.parameters(), reference.workers[seat.rank][0].parameters()):
            torch.testing.assert_close(mine, wanted, atol=1e-6, rtol=1e-5)


@check()
def settings_of_outer_gradients(seat: Seat) -> None:
    assert DiLoCo(compression="int4").written() == "DiLoCo(interval=256, compression=Int4(block=128))"
    assert SparseLoCo().codec == TopK(contributors=True) and SparseLoCo().momentum == 0 and SparseLoCo().rate == 1
    raises(UsageError, "no such codec", DiLoCo, compression="int5")
    raises(UsageError, "must be a codec", SparseLoCo, compression=None)
    raises(UsageError, "from 0 to 1", SparseLoCo, decay=1.5)
