"""SyncBatchNorm against torch's BatchNorm on all ranks' rows together."""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import nn

import sordino.torch as hvd
from checks.registry import Seat, check

SHAPES = {"1d": (4,), "1d with length": (4, 5), "2d": (4, 3, 5), "3d": (4, 2, 3, 2)}
PLAIN = {"1d": nn.BatchNorm1d, "1d with length": nn.BatchNorm1d, "2d": nn.BatchNorm2d, "3d": nn.BatchNorm3d}


def rows_of(rank: int, uneven: bool) -> int:
    return 3 + 2 * rank if uneven else 4


def data(rank: int, rows: int, inner: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng([seed, rank]).standard_normal((rows, *inner)) * 2 + 5)


def pair(seat: Seat, kind: str, **options: object) -> tuple[nn.Module, nn.Module]:
    mine = hvd.SyncBatchNorm(4, **options).double()
    plain = PLAIN[kind](4, **options).double()
    if options.get("affine", True):
        with torch.no_grad():
            for layer in (mine, plain):
                layer.weight.copy_(torch.tensor([0.5, 1.0, -2.0, 3.0]))
                layer.bias.copy_(torch.tensor([0.1, -0.2, 0.3, 0.0]))
    return mine, plain


OPTIONS = {
    "default": {},
    "momentum None": {"momentum": None},
    "momentum 0.3": {"momentum": 0.3, "eps": 1e-3},
    "not affine": {"affine": False},
    "no running stats": {"track_running_stats": False},
}


@check(kind=SHAPES, uneven=(False, True))
def equals_the_layer_on_the_whole_batch(seat: Seat, kind: str, uneven: bool) -> None:
    compare(seat, kind, uneven, "default")


@check(options=OPTIONS)
def with_options(seat: Seat, options: str) -> None:
    compare(seat, "2d", True, options)


def compare(seat: Seat, kind: str, uneven: bool, options: str) -> None:
    mine, plain = pair(seat, kind, **OPTIONS[options])
    inner = SHAPES[kind]
    counts = [rows_of(rank, uneven) for rank in range(seat.size)]
    here = slice(sum(counts[: seat.rank]), sum(counts[: seat.rank + 1]))
    for turn in range(3):
        parts = [data(rank, counts[rank], inner, turn) for rank in range(seat.size)]
        weights = torch.cat([data(rank, counts[rank], inner, turn + 50) for rank in range(seat.size)])
        whole = torch.cat(parts).requires_grad_()
        own = parts[seat.rank].clone().requires_grad_()
        mine.zero_grad()
        plain.zero_grad()
        output, wanted = mine(own), plain(whole)
        torch.testing.assert_close(output, wanted[here], atol=1e-10, rtol=1e-10)
        (output * weights[here]).sum().backward()
        (wanted * weights).sum().backward()
        torch.testing.assert_close(own.grad, whole.grad[here], atol=1e-9, rtol=1e-9)
        if mine.affine:  # stay local: the optimizer sums them
            for name in ("weight", "bias"):
                total = hvd.allreduce(getattr(mine, name).grad, op=hvd.Sum)
                torch.testing.assert_close(total, getattr(plain, name).grad, atol=1e-9, rtol=1e-9)
        if mine.track_running_stats:
            torch.testing.assert_close(mine.running_mean, plain.running_mean, atol=1e-10, rtol=1e-10)
            torch.testing.assert_close(mine.running_var, plain.running_var, atol=1e-10, rtol=1e-10)
            assert mine.num_batches_tracked == plain.num_batches_tracked == turn + 1
            seat.same("running", mine.running_mean, mine.running_var)
    mine.eval()
    plain.eval()
    parts = [data(rank, counts[rank], inner, 77) for rank in range(seat.size)]
    torch.testing.assert_close(mine(parts[seat.rank]), plain(torch.cat(parts))[here], atol=1e-10, rtol=1e-10)


@check(least=2)
def evaluation_does_not_communicate(seat: Seat) -> None:
    layer = hvd.SyncBatchNorm(4).eval()
    if seat.rank == 0:
        assert layer(torch.ones(2, 4)).shape == (2, 4)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == seat.size


@check(least=2)
def one_row_a_rank_and_none(seat: Seat) -> None:
    """One value a channel is too few for one process, but not for several; a rank may even have none."""
    mine, plain = pair(seat, "1d")
    rows = [data(rank, 0 if rank == seat.last and seat.size > 2 else 1, (4,), 0) for rank in range(seat.size)]
    own = rows[seat.rank].clone().requires_grad_()
    whole = torch.cat(rows).requires_grad_()
    output = mine(own)
    wanted = plain(whole)
    torch.testing.assert_close(output, wanted[seat.rank : seat.rank + len(own)], atol=1e-10, rtol=1e-10)
    (output**2).sum().backward()
    (wanted**2).sum().backward()
    torch.testing.assert_close(own.grad, whole.grad[seat.rank : seat.rank + len(own)], atol=1e-9, rtol=1e-9)


@check(dtype=(torch.float32, torch.bfloat16, torch.float16))
def narrow_inputs_far_from_zero(seat: Seat, dtype: torch.dtype) -> None:
    """Sums are taken in float32 at least; and the variance must not cancel."""
    layer = hvd.SyncBatchNorm(2)
    x = (torch.from_numpy(np.random.default_rng(seat.rank).standard_normal((64, 2))) + 100).to(dtype)
    output = layer(x)
    assert output.dtype == dtype
    everything = hvd.allgather(x).double()
    normal = (everything - everything.mean(0)) / (everything.var(0, unbiased=False) + layer.eps).sqrt()
    mine = normal[64 * seat.rank : 64 * (seat.rank + 1)]
    torch.testing.assert_close(output.double(), mine, atol=torch.finfo(dtype).eps * 8 + 1e-3, rtol=1e-3)


@check()
def trains_in_a_network(seat: Seat) -> None:
    """Network, SyncBatchNorm and DistributedOptimizer together equal one process on the whole batch."""

    def network(norm: nn.Module) -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 4), norm, nn.Tanh(), nn.Linear(4, 1)).double()
        with torch.no_grad():
            for i, parameter in enumerate(model.parameters()):
                parameter.copy_(torch.linspace(-1, 1 + 0.1 * i, parameter.numel()).view_as(parameter))
        return model

    mine, plain = network(hvd.SyncBatchNorm(4)), network(nn.BatchNorm1d(4))
    start = copy.deepcopy(plain.state_dict())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(mine.parameters(), lr=0.1, momentum=0.9), mine.named_parameters())
    reference = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for turn in range(4):
        whole = torch.cat([data(rank, 4, (3,), turn) for rank in range(seat.size)])
        for model, chosen, x in ((mine, optimizer, whole[4 * seat.rank : 4 * seat.rank + 4]), (plain, reference, whole)):
            chosen.zero_grad()
            (model(x) ** 2).mean().backward()
            chosen.step()
    for name, tensor in mine.state_dict().items():
        torch.testing.assert_close(tensor, plain.state_dict()[name], atol=1e-9, rtol=1e-9)
        seat.same(name, tensor)
    assert not torch.equal(start["0.weight"], mine[0].weight)
