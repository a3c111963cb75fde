"""SyncBatchNorm against torch's BatchNorm on the rows of all ranks: outputs, statistics, gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import sordino.torch as hvd
from checks.registry import Seat, check

CLOSE = {"atol": 1e-9, "rtol": 1e-9}
OPTIONS: dict[str, dict[str, object]] = {
    "default": {},
    "momentum None": {"momentum": None},
    "momentum and eps": {"momentum": 0.3, "eps": 1e-2},
    "not affine": {"affine": False},
    "no running stats": {"track_running_stats": False},
    "neither": {"affine": False, "track_running_stats": False},
}
KINDS = {
    "1d": (nn.BatchNorm1d, ()),
    "1d with length": (nn.BatchNorm1d, (5,)),
    "2d": (nn.BatchNorm2d, (3, 5)),
    "3d": (nn.BatchNorm3d, (2, 3, 2)),
}
LAYOUTS = {
    "2d": (nn.BatchNorm2d, (5, 3, 4), torch.channels_last),
    "3d": (nn.BatchNorm3d, (5, 2, 3, 4), torch.channels_last_3d),
}
Act = Callable[[torch.Tensor], torch.Tensor]


def part(rank: int, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng([seed, rank]).standard_normal(shape) * (1 + rank) + rank)


class Both:
    """The layer on this rank's rows, together with torch's layer on all rows, in float64."""

    def __init__(self, seat: Seat, plain: nn.Module, counts: list[int], **options: object) -> None:
        self.seat, self.plain, self.counts = seat, plain.double(), counts
        with torch.no_grad():
            for number, parameter in enumerate(self.plain.parameters()):
                parameter.copy_(part(7, tuple(parameter.shape), number))
        self.mine = hvd.SyncBatchNorm(plain.num_features, **options).double()
        self.mine.load_state_dict(plain.state_dict())  # same keys, so checkpoints fit
        self.here = slice(sum(counts[: seat.rank]), sum(counts[: seat.rank + 1]))

    def step(
        self, inner: tuple[int, ...], seed: int, act: Act = torch.square, layout: torch.memory_format | None = None
    ) -> None:
        whole = torch.cat([part(rank, (count, *inner), seed) for rank, count in enumerate(self.counts)])
        if layout is not None:
            whole = whole.contiguous(memory_format=layout)
        own = whole[self.here].clone(memory_format=torch.preserve_format).requires_grad_()
        whole.requires_grad_()
        self.mine.zero_grad()
        self.plain.zero_grad()
        output, wanted = self.mine(own), self.plain(whole)
        if layout is not None:
            assert output.is_contiguous(memory_format=layout)
        torch.testing.assert_close(output, wanted[self.here], **CLOSE)
        act(output).sum().backward()
        act(wanted).sum().backward()
        torch.testing.assert_close(own.grad, whole.grad[self.here], **CLOSE)
        for (name, mine), plain in zip(self.mine.named_parameters(), self.plain.parameters()):
            total = hvd.allreduce(mine.grad, op=hvd.Sum, name=name)
            torch.testing.assert_close(total, plain.grad, **CLOSE)
        self.assert_same_state()

    def assert_same_state(self) -> None:
        wanted = self.plain.state_dict()
        assert list(self.mine.state_dict()) == list(wanted)
        for name, value in self.mine.state_dict().items():
            torch.testing.assert_close(value, wanted[name], **CLOSE)
            self.seat.same(name, value)


@check(kind=KINDS, uneven=(False, True))
def equals_the_layer_on_the_whole_batch(seat: Seat, kind: str, uneven: bool) -> None:
    plain, inner = KINDS[kind]
    layer = Both(seat, plain(4), [3 + 2 * rank if uneven else 4 for rank in range(seat.size)])
    for seed in range(3):
        layer.step((4, *inner), seed, act=lambda y: y**3)


@check(options=OPTIONS)
def with_options(seat: Seat, options: str) -> None:
    counts = [3 + 2 * rank for rank in range(seat.size)]
    layer = Both(seat, nn.BatchNorm2d(3, **OPTIONS[options]), counts, **OPTIONS[options])
    for seed in range(3):
        layer.step((3, 2, 4), seed, act=lambda y: y**3)


@check(least=2)
def weights_without_biases(seat: Seat) -> None:
    plain = nn.BatchNorm2d(3)
    plain.register_parameter("bias", None)  # as bias=False does in new versions of PyTorch
    layer = Both(seat, plain, [3 + rank for rank in range(seat.size)], bias=False)
    layer.step((3, 2, 4), 0, act=lambda y: y**3)
    layer.mine = hvd.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))
    layer.step((3, 2, 4), 1, act=lambda y: y**3)


@check(least=2)
def one_row_a_rank(seat: Seat) -> None:
    """One row is too few for one process, but several ranks have enough."""
    Both(seat, nn.BatchNorm1d(3), [1] * seat.size).step((3,), 0, act=lambda y: y**3)


@check(least=2)
def evaluation_does_not_communicate(seat: Seat) -> None:
    layer = hvd.SyncBatchNorm(4).eval()
    if seat.rank == 0:
        assert layer(torch.ones(2, 4)).shape == (2, 4)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == seat.size


@check(least=2, options=OPTIONS)
def a_rank_without_rows(seat: Seat, options: str) -> None:
    """In each turn, the batch of another rank is empty. Its part of every sum is zero."""
    for empty in range(seat.size):
        counts = [0 if rank == empty else 3 + rank for rank in range(seat.size)]
        layer = Both(seat, nn.BatchNorm2d(3, **OPTIONS[options]), counts, **OPTIONS[options])
        for seed in range(2):
            layer.step((3, 2, 4), seed)


@check()
def nobody_has_rows(seat: Seat) -> None:
    layer = Both(seat, nn.BatchNorm1d(3), [0] * seat.size)
    layer.mine(torch.empty(0, 3, dtype=torch.float64))
    layer.plain(torch.empty(0, 3, dtype=torch.float64))
    layer.assert_same_state()


@check()
def one_value_in_all_is_refused(seat: Seat) -> None:
    """The variance of one value raises on all ranks, as in torch; the world stays usable."""
    for owner in range(seat.size):
        layer = hvd.SyncBatchNorm(3)
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            layer(torch.ones(int(seat.rank == owner), 3))
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == seat.size


@check(kind=("2d", "3d"))
def channels_last(seat: Seat, kind: str) -> None:
    plain, inner, layout = LAYOUTS[kind]
    layer = Both(seat, plain(5), [2 + rank for rank in range(seat.size)])
    for seed in range(2):
        layer.step(inner, seed, layout=layout)


@check(options=OPTIONS)
def before_an_activation_in_place(seat: Seat, options: str) -> None:
    """As in most networks, nn.ReLU(inplace=True) overwrites the output of the layer."""
    layer = Both(seat, nn.BatchNorm1d(3, **OPTIONS[options]), [4] * seat.size, **OPTIONS[options])
    layer.step((3,), 0, act=lambda y: torch.relu_(y) * 3)


@check(options=OPTIONS)
def training_and_evaluation_in_turn(seat: Seat, options: str) -> None:
    """Without running statistics, evaluation uses the statistics of the batch, also over all ranks."""
    counts = [3 + rank for rank in range(seat.size)]
    layer = Both(seat, nn.BatchNorm1d(3, **OPTIONS[options]), counts, **OPTIONS[options])
    for turn, training in enumerate((True, False, True, True, False)):
        layer.mine.train(training)
        layer.plain.train(training)
        layer.step((3, 2), turn)


@check()
def without_gradients(seat: Seat) -> None:
    """Under no_grad the running statistics are still updated."""
    layer = Both(seat, nn.BatchNorm1d(3), [4] * seat.size)
    with torch.no_grad():
        output = layer.mine(part(seat.rank, (4, 3)))
        wanted = layer.plain(torch.cat([part(rank, (4, 3)) for rank in range(seat.size)]))
    torch.testing.assert_close(output, wanted[layer.here], **CLOSE)
    assert not output.requires_grad
    layer.assert_same_state()


@check(frozen=("weight and bias", "input"))
def frozen(seat: Seat, frozen: str) -> None:
    whole = torch.cat([part(rank, (4, 3)) for rank in range(seat.size)])
    own = whole[4 * seat.rank : 4 * seat.rank + 4].clone()
    mine, plain = hvd.SyncBatchNorm(3).double(), nn.BatchNorm1d(3).double()
    for layer, x in ((mine, own), (plain, whole)):
        layer.requires_grad_(frozen == "input")
        x.requires_grad_(frozen != "input")
        (layer(x) ** 3).sum().backward()
    if frozen == "input":
        assert own.grad is None
        torch.testing.assert_close(hvd.allreduce(mine.weight.grad, op=hvd.Sum), plain.weight.grad, **CLOSE)
        torch.testing.assert_close(hvd.allreduce(mine.bias.grad, op=hvd.Sum), plain.bias.grad, **CLOSE)
    else:
        assert mine.weight.grad is None
        torch.testing.assert_close(own.grad, whole.grad[4 * seat.rank : 4 * seat.rank + 4], **CLOSE)


@check()
def second_derivatives_are_right_or_refused(seat: Seat) -> None:
    whole = torch.cat([part(rank, (4, 3)) for rank in range(seat.size)])
    here = slice(4 * seat.rank, 4 * seat.rank + 4)
    own = whole[here].clone()
    mine, plain = hvd.SyncBatchNorm(3).double(), nn.BatchNorm1d(3).double()

    def penalty(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        (slope,) = torch.autograd.grad((layer(x.requires_grad_()) ** 3).sum(), x, create_graph=True)
        (slope**2).sum().backward()
        assert x.grad is not None
        return x.grad

    wanted = penalty(plain, whole)
    try:
        result = penalty(mine, own)
    except RuntimeError:
        return  # torch's own SyncBatchNorm does the same
    torch.testing.assert_close(result, wanted[here], **CLOSE)


@check(dtype=(torch.float32, torch.float64), offset=(0.0, 1e4, -1e4))
def far_from_zero(seat: Seat, dtype: torch.dtype, offset: float) -> None:
    """E[x²] - E[x]² has no correct digit here in float32; the only permitted error is the rounding of the input."""
    rows = 500
    whole = torch.cat([part(rank, (rows, 2)) + offset for rank in range(seat.size)]).to(dtype)
    own = whole[rows * seat.rank : rows * (seat.rank + 1)].clone().requires_grad_()
    exact = whole.double().requires_grad_()
    layer = hvd.SyncBatchNorm(2, momentum=1.0).to(dtype)
    plain = nn.BatchNorm1d(2, momentum=1.0).double()
    output, wanted = layer(own), plain(exact)
    (output**3).sum().backward()
    (wanted**3).sum().backward()
    here = slice(rows * seat.rank, rows * (seat.rank + 1))
    step = torch.finfo(dtype).eps * max(abs(offset), 1)  # change of x by one rounding
    torch.testing.assert_close(layer.running_var.double(), plain.running_var, atol=0, rtol=20 * step**2 + 2e-5)
    torch.testing.assert_close(layer.running_mean.double(), plain.running_mean, atol=4 * step + 1e-6, rtol=0)
    torch.testing.assert_close(output.double(), wanted[here], atol=8 * step + 1e-5, rtol=1e-4)
    torch.testing.assert_close(own.grad.double(), exact.grad[here], atol=80 * step + 1e-4, rtol=1e-2)


@check(dtype=(torch.float16, torch.bfloat16), whole_layer=(False, True))
def narrow_types(seat: Seat, dtype: torch.dtype, whole_layer: bool) -> None:
    """Input in half precision, with the layer in float32 (as in autocast) or in the same type."""
    rows = 40
    whole = torch.cat([part(rank, (rows, 3, 5)) for rank in range(seat.size)]).to(dtype)
    here = slice(rows * seat.rank, rows * (seat.rank + 1))
    own, exact = whole[here].clone().requires_grad_(), whole.double().requires_grad_()
    layer, plain = hvd.SyncBatchNorm(3), nn.BatchNorm1d(3).double()
    if whole_layer:
        layer = layer.to(dtype)
    layer_dtype = layer.weight.dtype
    output, wanted = layer(own), plain(exact)
    output.float().square().sum().backward()
    wanted.square().sum().backward()
    assert (output.dtype, own.grad.dtype) == (dtype, dtype)
    assert (
        layer.running_mean.dtype
        == layer.running_var.dtype
        == layer.weight.grad.dtype
        == layer.bias.grad.dtype
        == layer_dtype
    )
    eps, layer_eps = torch.finfo(dtype).eps, torch.finfo(layer_dtype).eps
    torch.testing.assert_close(output.double(), wanted[here], atol=2 * eps, rtol=eps)
    torch.testing.assert_close(own.grad.double(), exact.grad[here], atol=8 * eps, rtol=8 * eps)
    close = {"atol": 4 * layer_eps, "rtol": 4 * layer_eps + 1e-6}
    torch.testing.assert_close(layer.running_mean.double(), plain.running_mean, **close)
    torch.testing.assert_close(layer.running_var.double(), plain.running_var, **close)
    total = hvd.allreduce(layer.weight.grad.double(), op=hvd.Sum)
    torch.testing.assert_close(total, plain.weight.grad, rtol=4 * eps, atol=1e-3)


@check()
def wrong_inputs_are_refused(seat: Seat) -> None:
    with pytest.raises(ValueError, match="at least 2D"):
        hvd.SyncBatchNorm(3)(torch.ones(3))
    assert isinstance(copy.deepcopy(hvd.SyncBatchNorm(3)), nn.modules.batchnorm._BatchNorm)


@check()
def several_layers(seat: Seat) -> None:
    """Layers in parallel branches and in sequence: their sums do not mix."""
    shared = [nn.Linear(3, 3).double() for _ in range(3)]
    for number, linear in enumerate(shared):
        with torch.no_grad():
            linear.weight.copy_(part(0, (3, 3), 90 + number))
            linear.bias.copy_(part(0, (3,), 95 + number))

    def run(norms: list[nn.Module], x: torch.Tensor) -> torch.Tensor:
        left, right = norms[0](shared[0](x)), norms[1](shared[1](x)).tanh()
        return norms[2](shared[2](left * right))

    whole = torch.cat([part(rank, (4 + rank, 3)) for rank in range(seat.size)])
    first = sum(4 + rank for rank in range(seat.rank))
    here = slice(first, first + 4 + seat.rank)
    own = whole[here].clone().requires_grad_()
    whole.requires_grad_()
    output = run([hvd.SyncBatchNorm(3).double() for _ in range(3)], own)
    wanted = run([nn.BatchNorm1d(3).double() for _ in range(3)], whole)
    torch.testing.assert_close(output, wanted[here], **CLOSE)
    (output**3).sum().backward()
    (wanted**3).sum().backward()
    torch.testing.assert_close(own.grad, whole.grad[here], atol=1e-7, rtol=1e-7)


@check()
def trains_in_a_network(seat: Seat) -> None:
    """Network, SyncBatchNorm and DistributedOptimizer together equal one process on the whole batch."""
    plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()
    with torch.no_grad():
        for number, parameter in enumerate(plain.parameters()):
            parameter.copy_(part(0, tuple(parameter.shape), number))
    mine = copy.deepcopy(plain)
    mine[1] = hvd.SyncBatchNorm(4).double()
    mine.load_state_dict(plain.state_dict())
    reference = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, mine.named_parameters())
    for turn in range(4):
        whole = torch.cat([part(rank, (4, 3), turn) for rank in range(seat.size)])
        own = whole[4 * seat.rank : 4 * seat.rank + 4]
        for model, chosen, x in ((mine, optimizer, own), (plain, reference, whole)):
            chosen.zero_grad()
            (model(x) ** 2).mean().backward()
            chosen.step()
    for name, tensor in mine.state_dict().items():
        torch.testing.assert_close(tensor, plain.state_dict()[name], **CLOSE)
        seat.same(name, tensor)


@check(least=3)
def statistics_of_a_process_set(seat: Seat) -> None:
    """In a process set, forward and backward equal torch's layer on the rows of the members; the other rank is
    alone."""
    some = hvd.add_process_set(range(1, seat.size))
    rows = [part(rank, (3, 4)) for rank in range(1, seat.size)] if seat.rank > 0 else [part(0, (3, 4))]
    alone = hvd.add_process_set([0])
    plain = nn.BatchNorm1d(4).double()
    mine = hvd.SyncBatchNorm(4, process_set=some if seat.rank > 0 else alone).double()
    mine = copy.deepcopy(mine)
    whole, own = torch.cat(rows).requires_grad_(), part(seat.rank, (3, 4)).requires_grad_()
    wanted = plain(whole)
    wanted.square().sum().backward()
    found = mine(own)
    found.square().sum().backward()
    here = slice(3 * max(0, seat.rank - 1), 3 * max(1, seat.rank))
    torch.testing.assert_close(found, wanted[here], **CLOSE)
    torch.testing.assert_close(own.grad, whole.grad[here], **CLOSE)
    torch.testing.assert_close(mine.running_var, plain.running_var, **CLOSE)
    hvd.remove_process_set(some)
    hvd.remove_process_set(alone)


@check()
def a_model_is_converted(seat: Seat) -> None:
    """All kinds of layers are converted, torch's SyncBatchNorm too. They keep their parameters and buffers, and
    converting again changes nothing."""
    inner = nn.Sequential(nn.BatchNorm2d(3, eps=1e-2, momentum=None), nn.SyncBatchNorm(3), nn.Linear(2, 2))
    model = nn.ModuleDict({"inner": inner, "one": nn.BatchNorm1d(3, affine=False), "lazy": nn.LazyBatchNorm1d()})
    model.eval()
    state = {name: value for name, value in model.state_dict(keep_vars=True).items() if not name.startswith("lazy")}
    converted = hvd.SyncBatchNorm.convert_sync_batchnorm(model)
    assert converted is model
    kinds = [type(layer).__name__ for layer in (*inner, model["one"], model["lazy"])]
    assert kinds == ["SyncBatchNorm", "SyncBatchNorm", "Linear", "SyncBatchNorm", "LazyBatchNorm1d"]
    assert isinstance(inner[1], hvd.SyncBatchNorm)
    after = model.state_dict(keep_vars=True)
    assert all(after[name] is value for name, value in state.items())
    assert (inner[0].eps, inner[0].momentum, inner[0].training) == (1e-2, None, False)
    again = hvd.SyncBatchNorm.convert_sync_batchnorm(inner[0])
    assert again is inner[0]
    assert isinstance(hvd.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(2)), hvd.SyncBatchNorm)
    model = nn.ModuleDict({"first": nn.BatchNorm1d(2), "block": nn.Sequential(nn.Linear(2, 2))})
    model["block"].append(model["first"])  # one layer in three places
    model["again"] = model["first"]
    hvd.SyncBatchNorm.convert_sync_batchnorm(model)
    assert isinstance(model["first"], hvd.SyncBatchNorm) and model["block"][1] is model["again"] is model["first"]
