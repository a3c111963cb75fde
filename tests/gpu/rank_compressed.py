"""Encoded means of tensors on a device: all ranks get the same bits, and the bits that the host computes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from checks.odd import Odd
from rank_seat import Seat, check

import sordino.torch as hvd
from sordino.algorithms import Algorithm, AllReduce, DiLoCo, LocalSGD, SparseLoCo
from sordino.codecs import Codec, Int8, Sign, TopK

STEPS = 6
GRADIENTS: dict[str, Codec | str] = {
    "int8": "int8",
    "int4": "int4",
    "two-bit": "two-bit",
    "sign": Sign(32),
    "top": TopK(0.1, 128),
    "top, exact": TopK(0.1, 32, bits=32),
    "top, contributors": TopK(1 / 16, 4096, contributors=True),
    "bfloat16": "bfloat16",
}
# Powers of two: products are exact, so sums have the same bits with a fused multiplication.
EXACT: dict[str, Any] = {"outer_lr": 0.5, "outer_momentum": 0.5}
ALGORITHMS: dict[str, Callable[[], Algorithm]] = {
    "diloco, int8": lambda: DiLoCo(interval=2, **EXACT, compression="int8"),
    "diloco, sign, in background": lambda: DiLoCo(interval=3, **EXACT, compression=Sign(64), overlap=1),
    "sparse loco": lambda: SparseLoCo(interval=2, compression=TopK(0.1, 128, contributors=True)),
    "local sgd, whole models": lambda: LocalSGD(2, exchange="allreduce", compression="int4"),
    "local sgd, shards": lambda: LocalSGD(2, exchange="sharded", compression="two-bit"),
}


class Larger(Odd):
    """The model with one large parameter, which has many blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.large = torch.nn.Parameter(torch.randn(20_011, generator=torch.Generator().manual_seed(5)))


def gradient(seat: Seat, index: int, like: torch.Tensor, turn: int) -> torch.Tensor:
    """Return a hand-made gradient, which has the same bits on all devices."""
    generator = torch.Generator().manual_seed(1000 * turn + 10 * index + seat.rank)
    return seat.put(torch.randn(like.shape, generator=generator).to(like.dtype))


def wrapped(seat: Seat, algorithm: Algorithm, codec: Codec | str | None) -> tuple[Larger, hvd.DistributedOptimizer]:
    model = Larger().to(seat.device)
    options: dict[str, Any] = {} if codec is None else {"compression": codec}
    inner = torch.optim.SGD(model.parameters(), lr=0.25)
    return model, hvd.DistributedOptimizer(inner, model.named_parameters(), algorithm=algorithm, **options)


def train(seat: Seat, model: Larger, optimizer: hvd.DistributedOptimizer, turns: range) -> None:
    for turn in turns:
        optimizer.zero_grad()
        for index, parameter in enumerate(model.parameters()):
            parameter.grad = gradient(seat, index, parameter, turn)
        optimizer.step()


def values_of(model: Larger) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in model.parameters()]


@check(least=2, each=GRADIENTS)
def gradients_have_the_bits_of_the_host(seat: Seat, which: str) -> None:
    def run() -> list[torch.Tensor]:
        model, optimizer = wrapped(seat, AllReduce(), GRADIENTS[which])
        train(seat, model, optimizer, range(STEPS))
        return values_of(model)

    for mine, host in seat.twins(run):
        assert torch.equal(mine, host), which
        seat.same(which, mine)


@check(least=2, each=ALGORITHMS)
def parameters_have_the_bits_of_the_host(seat: Seat, which: str) -> None:
    def run() -> list[torch.Tensor]:
        model, optimizer = wrapped(seat, ALGORITHMS[which](), None)
        train(seat, model, optimizer, range(STEPS))
        optimizer.flush()
        return values_of(model)

    for mine, host in seat.twins(run):
        assert torch.equal(mine, host), which
        if "background" not in which:
            seat.same(which, mine)


@check(least=2, each=("gradients", "diloco", "diloco in background"))
def residuals_of_a_checkpoint_fit_both_devices(seat: Seat, which: str) -> None:
    """Training that resumes has the same bits, from a state of the device and from a state of the host."""
    algorithm, codec = {
        "gradients": (AllReduce(), Sign(32)),
        "diloco": (DiLoCo(interval=3, compression=Sign(32)), None),
        "diloco in background": (DiLoCo(interval=3, compression=TopK(0.1, 32), overlap=2), None),
    }[which]
    model, optimizer = wrapped(seat, algorithm, codec)
    train(seat, model, optimizer, range(4))
    states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(seat, model, optimizer, range(4, 8))
    for device in (seat.device, torch.device("cpu")):
        of_model, of_optimizer = moved(copy.deepcopy(states), device)
        other, resumed = wrapped(seat, algorithm, codec)
        other.load_state_dict(of_model)
        resumed.load_state_dict(of_optimizer)
        train(seat, other, resumed, range(4, 8))
        for one, wanted in zip(values_of(other), values_of(model)):
            assert torch.equal(one, wanted), (which, device)


def moved(state: Any, device: torch.device) -> Any:
    """Return a state with all tensors on a device."""
    if isinstance(state, torch.Tensor):
        return state.to(device)
    if isinstance(state, dict):
        return type(state)((key, moved(value, device)) for key, value in state.items())
    if isinstance(state, (list, tuple)):
        return type(state)(moved(value, device) for value in state)
    return state


@check(least=2)
def encoded_bytes_go_the_way_of_other_tensors(seat: Seat) -> None:
    """Gradients are encoded, sent and decoded on the device: no copy of them goes through the host."""
    model, optimizer = wrapped(seat, AllReduce(), Int8())
    with seat.goes(seat.moves, alone=False):
        train(seat, model, optimizer, range(2))


@check(least=2)
def what_is_not_finite(seat: Seat) -> None:
    """A NaN of one rank is a NaN of its block on all ranks, and that rank warns."""
    parameter = torch.nn.Parameter(seat.put(torch.zeros(1000)))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), compression=Int8(128))
    parameter.grad = torch.ones_like(parameter)
    if seat.rank == 0:
        parameter.grad[300] = float("nan")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    messages = [str(one.message) for one in caught if "NaN or an infinity" in str(one.message)]
    assert len(messages) == (seat.rank == 0) and all("1 block of 128 values" in one for one in messages), messages
    found = parameter.detach().cpu()
    assert bool(found[256:384].isnan().all()) and int(found.isnan().sum()) == 128
