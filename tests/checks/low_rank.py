"""Means as low-rank factors (PowerSGD): against float64, conservation, NaN, failures, and optimizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

import sordino.torch as hvd
from checks.agreement import raises
from checks.registry import Seat, check
from checks.training import Twins
from sordino.algorithms import AllReduce, Crossover, DiLoCo, LocalSGD
from sordino.codecs import Int8, PowerSGD
from sordino.errors import ConfigurationMismatch, NonFinite, PeerLost, UsageError
from sordino.runtime.exchange import tensor_means
from sordino.runtime.exchange.low_rank_mean import LowRankMean
from sordino.runtime.exchange.transfers import SetTransfers
from sordino.runtime.process_set import ProcessSet, global_process_set

SHAPES = ((24, 20), (7,), (5, 6, 4), (3, 2), (), (30, 9), (0, 4))
FACTORED = (0, 2, 5)  # with rank 2

Tensors = list[torch.Tensor]


def mean_of(
    rank: int, shapes: Sequence[Sequence[int]] = SHAPES, name: str = "mean", ranks: ProcessSet = global_process_set
) -> LowRankMean:
    return LowRankMean(PowerSGD(rank), [torch.empty(shape) for shape in shapes], name, SetTransfers(name, ranks))


def drawn(rank: int, turn: int, shapes: Sequence[Sequence[int]] = SHAPES) -> Tensors:
    """Return gradients of a rank, with a part that all ranks have in every turn."""
    own = torch.Generator().manual_seed(100 * turn + rank)
    common = torch.Generator().manual_seed(7)
    return [torch.randn(one, generator=own) + torch.randn(one, generator=common) for one in shapes]


def mean_of_drawn(size: int, turn: int) -> Tensors:
    return [sum(ones).double() / size for ones in zip(*(drawn(rank, turn) for rank in range(size)))]


def rights(mean: LowRankMean) -> Tensors:
    return [one.right for one in mean._matrices]


def gram_schmidt(columns: torch.Tensor) -> torch.Tensor:
    found: Tensors = []
    for column in columns.T:
        for one in found:
            column = column - (one @ column) * one
        found.append(column / column.norm())
    return torch.stack(found, 1)


class Reference:
    """PowerSGD of all ranks by its formulas, in float64: Vogels et al. 2019, Algorithms 1 and 2."""

    def __init__(self, mean: LowRankMean, size: int) -> None:
        self.factors = dict(zip(mean.matrix_residuals, (right.double() for right in rights(mean))))
        self.errors = {
            place: [torch.zeros(one.shape, dtype=torch.float64)] * size for place, one in mean.matrix_residuals.items()
        }

    def step(self, gradients: Sequence[Tensors]) -> Tensors:
        """Return the means of the gradients of all ranks."""
        means = []
        for place, ones in enumerate(zip(*gradients)):
            ones = [one.double() for one in ones]
            if place not in self.factors:
                means.append(sum(ones) / len(ones))
                continue
            errors = self.errors[place]
            matrices = [one.reshape(error.shape) + error for one, error in zip(ones, errors)]
            left = gram_schmidt(sum(matrix @ self.factors[place] for matrix in matrices) / len(matrices))
            own = [matrix.T @ left for matrix in matrices]
            self.factors[place] = sum(own) / len(own)
            self.errors[place] = [matrix - left @ one.T for matrix, one in zip(matrices, own)]
            means.append((left @ self.factors[place].T).reshape(ones[0].shape))
        return means


def near(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], slack: float = 2e-4) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other.double(), atol=slack, rtol=slack, equal_nan=True)


@check(least=2, dtype=(torch.float32, torch.float64, torch.bfloat16), quick=("sim-3x1",))
def means_follow_the_formulas(seat: Seat, dtype: torch.dtype) -> None:
    mean = mean_of(2)
    assert tuple(mean.matrix_residuals) == FACTORED
    seat.same("first factor", *rights(mean))
    reference = Reference(mean, seat.size)
    for turn in range(6):
        given = [[one.to(dtype) for one in drawn(rank, turn)] for rank in range(seat.size)]
        wanted = reference.step(given)
        mine = given[seat.rank]
        mean.run(mine)
        seat.same("means", *(one.float() for one in mine), *rights(mean))
        assert all(one.dtype == dtype for one in mine)
        near(mine, wanted, 2e-2 if dtype == torch.bfloat16 else 2e-4)
        near(list(mean.matrix_residuals.values()), [errors[seat.rank] for errors in reference.errors.values()])


@check(least=2, rank=(1, 3))
def nothing_is_lost_for_good(seat: Seat, rank: int) -> None:
    """All means so far, and the mean of the residuals, add up to the means of all gradients."""
    mean = mean_of(rank)
    sent = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    wanted = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    for turn in range(8):
        mine = drawn(seat.rank, turn)
        mean.run(mine)
        sent = [before + one for before, one in zip(sent, mine)]
        wanted = [before + one for before, one in zip(wanted, mean_of_drawn(seat.size, turn))]
    lost = (sent[0] - wanted[0]).norm()
    for place, residual in mean.matrix_residuals.items():
        sent[place] += hvd.allreduce(residual.double(), name=f"left {place}").view(SHAPES[place])
    near(sent, wanted, 1e-5)
    assert lost > 1.0  # so the residuals were needed


@check(least=2)
def what_is_owed_of_whole_tensors_is_sent(seat: Seat) -> None:
    """Such residuals come from a state that another codec has written."""
    for shapes in ([(24, 20), (7,)], [(3, 2), (7,)]):  # with a matrix, and without
        mean = mean_of(2, shapes, name=f"of {shapes}")
        mean.residuals[0][-7:].fill_(seat.rank + 1.0)
        for owed in ((seat.size + 1) / 2, 0.0):
            tensors = [torch.zeros(shape) for shape in shapes]
            mean.run(tensors)
            assert tensors[1].tolist() == [owed] * 7


@check(least=2)
def enough_directions_lose_nothing(seat: Seat) -> None:
    """With 2 directions, a mean of rank 2 is exact from the first step on. If factors would save nothing, every mean is
    exact."""
    for turn in range(3):
        whole = mean_of(20, name=f"whole {turn}")
        assert not whole.matrix_residuals
        mine = drawn(seat.rank, turn)
        whole.run(mine)
        near(mine, mean_of_drawn(seat.size, turn), 1e-6)
    mean, zero = mean_of(2, [(24, 20)]), torch.zeros(24, 20)
    for turn, scale in enumerate((1.0, 1e-25, 1e-25, 1e20, 1e20, 0.0, 1e-3)):
        generator = torch.Generator().manual_seed(turn)
        exact = scale * torch.randn(24, 2, generator=generator) @ torch.randn(2, 20, generator=generator)
        own = torch.randn(24, 20, generator=generator) * scale * (1 if seat.rank == 0 else -1)
        mine = exact + (own if seat.rank < 2 else zero)  # the mean is `exact`
        mean._matrices[0].residual.zero_()  # rounding errors of larger gradients
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mean.run([mine])
        torch.testing.assert_close(mine, exact, atol=1e-5 * float(exact.abs().max()), rtol=0)


@check(least=2, bad=(float("nan"), float("inf")))
def what_is_not_finite_stays_so(seat: Seat, bad: float) -> None:
    """A NaN or an infinity reaches all ranks, but not later means: they are those without this step."""
    mean = mean_of(2)
    reference = Reference(mean, seat.size)
    for turn in range(4):
        given = [drawn(rank, turn) for rank in range(seat.size)]
        if turn == 1:
            given[0][0][3, 4] = given[seat.last][1][2] = bad
            mine = [one.clone() for one in given[seat.rank]]
            with seat.warned("NaN or an infinity", when=seat.rank in (0, seat.last)):
                mean.run(mine)
                mean.report()
            assert mine[0].isnan().all() and not mine[1][2].isfinite()
            assert all(one.isfinite().all() for one in mine[2:])
            before, factor = reference.errors[0], reference.factors[0]
            reference.step(given)
            reference.errors[0], reference.factors[0] = before, factor
            continue
        wanted = reference.step(given)
        mean.run(given[seat.rank])
        near(given[seat.rank], wanted)


@check(least=2, part=("left", "right"))
def a_failed_mean_changes_nothing(seat: Seat, part: str) -> None:
    """Neither tensors, residuals nor factors change."""
    mean, other = mean_of(2), mean_of(2, name="other")
    for turn in range(3):
        mine, wanted = drawn(seat.rank, turn), drawn(seat.rank, turn)
        if turn > 0:
            before, real = [one.clone() for one in mine], mean._transfers
            mean._transfers = _Failing(real, part)
            raises(PeerLost, "rank 9", mean.run, mine)
            mean._transfers = real
            near(mine, before, 0.0)
        mean.run(mine)
        other.run(wanted)
        near(mine, wanted, 0.0)
        near(list(mean.matrix_residuals.values()), list(other.matrix_residuals.values()), 0.0)


class _Failing:
    """The collectives of some ranks, of which one fails."""

    def __init__(self, real: SetTransfers, part: str) -> None:
        self.size, self._real, self._part = real.size, real, part

    def all_reduce(self, sent: torch.Tensor, part: str) -> Callable[[], torch.Tensor]:
        received = self._real.all_reduce(sent, part)

        def wait() -> torch.Tensor:
            found = received()
            if part == self._part:
                raise PeerLost("rank 9 is gone", [9])
            return found

        return wait


@check(least=3)
def a_process_set_has_its_own_mean(seat: Seat) -> None:
    ranks = [0, seat.last]
    both = hvd.add_process_set(ranks)
    if seat.rank in ranks:
        mean = mean_of(2, name="of two", ranks=both)
        reference = Reference(mean, 2)
        for turn in range(2):
            mine = drawn(seat.rank, turn)
            mean.run(mine)
            near(mine, reference.step([drawn(rank, turn) for rank in ranks]))
    hvd.barrier()
    hvd.remove_process_set(both)


@check()
def one_rank_and_what_does_not_fit(seat: Seat) -> None:
    mean = mean_of(2)
    raises(UsageError, "and must be", mean.run, drawn(0, 0)[1:])
    if seat.size == 1:
        mine = drawn(0, 0)
        mean.run(mine)
        near(mine, drawn(0, 0), 0.0)
    model = torch.nn.Linear(2, 2)

    def wrap(**options: object) -> None:
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **options)

    raises(UsageError, "always averages", wrap, compression=PowerSGD(), op=hvd.Sum)
    raises(UsageError, "double_buffering", wrap, compression="powersgd", algorithm=AllReduce(double_buffering=True))
    raises(UsageError, "has no setting", wrap, compression="PowerSGD(ranks=2)")
    raises(UsageError, "at least 1", PowerSGD, rank=0)
    for algorithm in (DiLoCo, LocalSGD):
        raises(UsageError, "Use one of Int8, Int4, TwoBit, Sign, TopK", algorithm, compression="PowerSGD(rank=2)")
    raises(UsageError, "Use one of Int8, Int4, Float16, BFloat16", Crossover, compression=PowerSGD())
    if seat.size > 1:
        raises(ConfigurationMismatch, "compression", wrap, compression=PowerSGD(1 + (seat.rank > 0)))
    complex_ones = [torch.zeros(9, 9, dtype=torch.complex64)]
    raises(UsageError, "not torch.complex64", tensor_means.mean_of, Int8(), complex_ones, "these", mean._transfers)


# ---- optimizers -----------------------------------------------------------------------------------------------------


@check(rank=(2, 64), set_to_none=(True, False), dtype=(torch.float32, torch.float64), least=2)
def training_comes_near(seat: Seat, rank: int, set_to_none: bool, dtype: torch.dtype) -> None:
    """Training is exact if factors would save nothing; otherwise all ranks are equal."""
    twins = Twins(seat, dtype=dtype, compression=PowerSGD(rank))
    for _ in range(4):
        twins.train(1, set_to_none=set_to_none)
        seat.same("parameters", *twins.model.parameters())
    if rank == 64:
        twins.check(1e-5)


@check(least=2, bucket_bytes=(1 << 24, 2000), passes=(1, 2))
def steps_add_up_to_all_gradients(seat: Seat, bucket_bytes: int, passes: int) -> None:
    """With plain SGD, the change of the parameters plus the mean of the residuals is the sum of all mean gradients.

    Some parameters have no gradient on some ranks, or at first.
    """
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES[:6]]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters, lr=1.0),
        [(f"p{k}", one) for k, one in enumerate(parameters)],
        compression="PowerSGD(rank=2)",
        algorithm=AllReduce(bucket_bytes=bucket_bytes),
        backward_passes_per_step=passes,
    )
    total = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES[:6]]
    for turn in range(6):
        optimizer.zero_grad()
        for place, parameter in enumerate(parameters):
            with_gradient = [
                r for r in range(seat.size) if not (place == 2 and r == 0) and not (place == 5 and turn < 3)
            ]
            if seat.rank in with_gradient:
                parameter.grad = drawn(seat.rank, turn)[place]
            total[place] += sum(drawn(r, turn)[place].double() for r in with_gradient) / seat.size
        optimizer.step()
        seat.same("parameters", *parameters)
        assert turn >= 3 or parameters[5].grad is None
    reducer = optimizer._strategy.reducer
    left = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES[:6]]
    for bucket in reducer._buckets:
        mean = reducer._encoded._means[bucket.name]
        for number, residual in mean.matrix_residuals.items():
            place = bucket.members[number]
            left[place] = hvd.allreduce(residual.double(), name=f"left {place}").view(SHAPES[place])
    near([one - parameter.detach() for one, parameter in zip(left, parameters)], total, 1e-5)
    assert all((left[place].norm() > 0.1) == (place in FACTORED) for place in range(6))


@check(least=2)
def a_gradient_that_is_not_finite(seat: Seat) -> None:
    parameter = torch.nn.Parameter(torch.zeros(16, 16))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([parameter], lr=1.0), compression=PowerSGD(1), check_finite=True
    )
    for turn in range(2):
        parameter.grad = torch.ones(16, 16)
        if turn == 0 and seat.rank == seat.last:
            parameter.grad[7, 3] = float("inf")
            raises(NonFinite, "", optimizer.step)
        elif turn == 0:
            raises(NonFinite, "", optimizer.step)
        else:
            optimizer.step()
    assert torch.allclose(parameter.detach(), -torch.ones(16, 16))


@check(least=4)
def gradients_within_groups(seat: Seat) -> None:
    """Each group of an algorithm with groups has its own mean."""
    if seat.size % 2:
        return
    parameter = torch.nn.Parameter(torch.zeros(16, 16))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([parameter], lr=1.0),
        algorithm=LocalSGD(interval=100, group_size=2, exchange="allreduce"),
        compression=PowerSGD(1),
    )
    parameter.grad = torch.full((16, 16), float(seat.rank))
    optimizer.step()
    wanted = -(seat.rank // 2 * 2 + 0.5)
    torch.testing.assert_close(parameter.detach(), torch.full((16, 16), wanted))
