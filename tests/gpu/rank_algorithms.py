"""Every algorithm on a device, compared with the same training on the hosts of the same ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from algorithm_table import CONSERVING, GOSSIPING
from checks.odd import OPTIMIZERS, Odd, batch
from rank_seat import Seat, check

import sordino.torch as hvd
from sordino.algorithms import (
    ADPSGD,
    Algorithm,
    AllReduce,
    CaPS,
    Crossover,
    DiLoCo,
    Layered,
    LocalSGD,
    NoLoCo,
    PushSum,
    ScheduledPull,
)
from sordino.codecs import PowerSGD

STEPS = 7
Makers = dict[str, Callable[[int], Algorithm]]

EQUAL: Makers = {  # all ranks have the same parameters afterwards
    "allreduce": lambda n: AllReduce(),
    "local SGD, whole models": lambda n: LocalSGD(interval=STEPS, exchange="allreduce"),
    "local SGD, shards": lambda n: LocalSGD(interval=STEPS, exchange="sharded"),
    "local SGD, shards of a group": lambda n: LocalSGD(interval=STEPS, group_size=n, exchange="sharded"),
    "local SGD, pseudo-gradients": lambda n: LocalSGD(interval=STEPS, aggregate="gradients", exchange="allreduce"),
    "layered": lambda n: Layered(n),
    "layered, small groups": lambda n: Layered(max(1, n // 2)),
    "DiLoCo": lambda n: DiLoCo(interval=STEPS, outer_momentum=0.5),
    "skipping, nothing": lambda n: CaPS(threshold=100.5),
    "skipping by servers": lambda n: CaPS(threshold=100.5, exchange="parameter-server"),
}
OWN: Makers = {  # each rank has its own parameters afterwards
    **{name: lambda n, one=one: one for name, one in GOSSIPING.items()},  # type: ignore[misc]
    "crossover of the model": lambda n: Crossover(segments="model"),
    "crossover of groups": lambda n: Crossover(group_size=2) if n > 2 and n % 2 == 0 else Crossover(),
    "push-sum, overlapping": lambda n: PushSum(overlap=2),
    "DiLoCo, overlapping": lambda n: DiLoCo(interval=3, overlap=1, outer_momentum=0.5),
    "NoLoCo": lambda n: NoLoCo(interval=2),
    "skipping by random samples": lambda n: CaPS("random", 40.0, sample_ratio=0.5),
}


def trained(seat: Seat, algorithm: Algorithm, name: str = "momentum", **options: Any) -> list[torch.Tensor]:
    model = Odd().to(seat.device)
    start = [parameter.stride() for parameter in model.parameters()]
    inner = OPTIMIZERS[name](list(model.parameters()))
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), algorithm=algorithm, **options)
    for turn in range(STEPS):
        inputs, targets = (seat.put(one) for one in batch(seat.rank, turn))
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    optimizer.flush()
    found = list(model.state_dict().values())
    assert [tensor.stride() for tensor in found] == start
    assert all(tensor.device == seat.device for tensor in found)
    return found


def near(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Assert that results are near each other: matrix products add in another order, and Adam amplifies this."""
    for mine, host in pairs:
        torch.testing.assert_close(mine, host, atol=1e-4, rtol=1e-3)


@check(least=2, each=EQUAL)
def all_ranks_are_equal(seat: Seat, which: str) -> None:
    for name in ("momentum", "adam"):
        pairs = seat.twins(lambda name=name: trained(seat, EQUAL[which](seat.size), name))
        near(pairs)
        seat.same(which, *[mine for mine, _ in pairs])


@check(least=2, each=OWN)
def each_is_its_twin(seat: Seat, which: str) -> None:
    for name in ("momentum", "adam"):
        near(seat.twins(lambda name=name: trained(seat, OWN[which](seat.size), name)))


@check(least=2, each=(1, 3))
def low_rank_gradients(seat: Seat, rank: int) -> None:
    pairs = seat.twins(lambda: trained(seat, AllReduce(), compression=PowerSGD(rank)))
    near(pairs)
    seat.same("low rank", *[mine for mine, _ in pairs])


@check(least=2, each=("crossover", "dpsgd", "push-sum", "local SGD, whole models"))
def the_expected_way(seat: Seat, which: str) -> None:
    with seat.goes(seat.reduces, alone=False):
        trained(seat, (OWN | EQUAL)[which](seat.size))


@check(least=2)
def exchanges_conserve_the_mean(seat: Seat) -> None:
    """The mean of many values is conserved, in exchanges directly after steps that are slow on a GPU."""
    for algorithm in (one for one in CONSERVING.values() if not one.weighted):  # type: ignore[attr-defined]
        parameter = torch.nn.Parameter(seat.put(torch.full((300_007,), float(seat.rank + 1))))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), algorithm=algorithm)
        for _ in range(5):
            if seat.device.type == "cuda":
                torch.cuda._sleep(20_000_000)
            parameter.grad = torch.full_like(parameter, float(seat.rank))
            optimizer.step()
        wanted = (seat.size + 1) / 2 - 5 * (seat.size - 1) / 2
        mean = hvd.allreduce(parameter.detach()).cpu()
        torch.testing.assert_close(mean, torch.full((300_007,), wanted), atol=1e-4, rtol=1e-4)
        assert bool((parameter == parameter[0]).all()), "elements of one exchange went different ways"


# ---- parameter skipping ----------------------------------------------------------------------------------------------


def skipped(seat: Seat, detector: str, granularity: str, digits: int | None) -> tuple[list[object], list[torch.Tensor]]:
    """Train with hand-made gradients, whose sums have the same bits on all devices; return the decisions."""
    sizes = (1000, 640, 77, 64, 5000)
    tensors = [torch.nn.Parameter(seat.put(torch.arange(size, dtype=torch.float32) + 1)) for size in sizes]
    algorithm = CaPS(
        detector,  # type: ignore[arg-type]
        70.0,
        digits=digits,
        sample_ratio=0.1,
        survey_interval=3,
        probe_interval=4,
        granularity=granularity,  # type: ignore[arg-type]
        block_bytes=256,
    )
    names = [f"t{k}" for k in range(len(sizes))]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(tensors, lr=0.5), list(zip(names, tensors)), algorithm=algorithm
    )
    decided: list[object] = []
    for turn in range(12):
        generator = torch.Generator().manual_seed(turn)  # the same on all ranks: their means are exact
        for tensor in tensors:
            share = float(torch.rand(1, generator=generator))
            moved = torch.rand(tensor.shape, generator=generator) < share * share
            tensor.grad = seat.put(moved.float())
        optimizer.step()
        decided.append(optimizer.state_dict()["sordino"]["skipped"].tolist())
    optimizer.report_metric(1.0)
    (point,) = optimizer.statistics.points
    decided += [point.ratios, point.skipped, point.bytes_sent]
    optimizer.flush()
    return decided, [tensor.detach() for tensor in tensors]


@check(each=[f"{one} {other}" for one in ("naive", "random", "history", "movement") for other in ("tensor", "block")])
def counts_are_those_of_the_host(seat: Seat, which: str) -> None:
    detector, granularity = which.split()
    for digits in (None,) if detector == "movement" else (None, 3):  # it does not compare values
        mine, here = skipped(seat, detector, granularity, digits)
        with seat.on_host():
            wanted, there = skipped(seat, detector, granularity, digits)
        assert mine == wanted
        for one, other in zip(here, there):
            assert torch.equal(one.cpu(), other)
        seat.same("decided", mine)


# ---- timing ----------------------------------------------------------------------------------------------------------


def meet(seat: Seat, name: str) -> None:
    """Wait for the other ranks without the library, by files."""
    (Path(seat.folder) / f"{name}.{seat.rank}").touch()
    limit = time.monotonic() + 60
    for rank in range(seat.size):
        while not (Path(seat.folder) / f"{name}.{rank}").exists():
            assert time.monotonic() < limit, f"rank {rank} does not come to {name}"
            time.sleep(0.001)


SHAPES = ((70_001, torch.float32), (11, torch.float64))
PULLS = {
    "none": ScheduledPull(2, overlap="none"),
    "naive": ScheduledPull(2, overlap="naive"),
    "manager": ScheduledPull(2, schedule="manager"),
    "autonomous": ScheduledPull(2),
}


@check(least=2, each=PULLS)
def pulled_models_are_whole(seat: Seat, which: str) -> None:
    """Every step adds one to every value. A pulled model is some steps older, and is from a single snapshot."""
    big, wide = (torch.full((count,), seat.rank + 1.0, dtype=dtype) for count, dtype in SHAPES)
    model = torch.nn.ParameterDict({"big": big, "wide": wide}).to(seat.device)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), algorithm=PULLS[which]
    )
    for turn in range(100):
        if turn % 10 == 0:
            meet(seat, f"{which} {turn}")
        for tensor in model.values():
            tensor.grad = torch.full_like(tensor, -1.0)
        optimizer.step()
        time.sleep(0.0005)
        for tensor in model.values():
            low, high = tensor.detach().aminmax()
            assert low == high, (turn, low, high)
            assert 0.4 * turn - 15 <= float(low) <= turn + 15 + seat.size, (turn, low)
    assert optimizer.statistics.pulls > 0 and optimizer.statistics.failed == 0
    meet(seat, "pulled")


@check(least=2, each=(0, 1, 3))
def averaging_in_pairs_conserves_the_mean(seat: Seat, overlap: int) -> None:
    generator = torch.Generator().manual_seed(seat.rank)
    model = torch.nn.ParameterDict({"a": torch.randn(50_001, generator=generator).double()}).to(seat.device)
    first = hvd.allreduce(model["a"].detach())
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5), model.named_parameters(), algorithm=ADPSGD(overlap=overlap)
    )
    for _ in range(25):
        model["a"].grad = torch.full_like(model["a"], float(seat.rank))
        optimizer.step()
    optimizer.flush()
    meet(seat, f"flushed {overlap}")
    limit = time.monotonic() + 30
    while optimizer._strategy._averager._number is not None:
        assert time.monotonic() < limit, "an averaging does not end"
        time.sleep(0.0005)
    meet(seat, f"idle {overlap}")
    optimizer.flush()
    mean = hvd.allreduce(model["a"].detach())
    torch.testing.assert_close(mean, first - 0.5 * 25 * (seat.size - 1) / 2, atol=1e-9, rtol=0)
    assert optimizer.statistics.failed == 0
