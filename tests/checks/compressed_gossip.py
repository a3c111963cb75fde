"""Gossip with encoded parameters: the mean does not change, results are near exact ones, and missed blocks recover."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from algorithm_table import CONSERVING, ENCODING

import sordino.torch as hvd
from checks.agreement import raises
from checks.diloco import Layers, same_parameters, sgd, train, train_resumed
from checks.registry import Seat, check
from sordino.algorithms import DPSGD, Crossover, NoLoCo, PushSum
from sordino.algorithms.gossip import AveragingGossip
from sordino.codecs import BFloat16, Codec, Float16, Int4, Int8
from sordino.errors import ConfigurationMismatch, NonFinite, PeerLost, UsageError

STEP, SIZES = 0.01, (1, 333, 5000)
ALGORITHMS: dict[str, Any] = {
    **{name: replace(one, segments=4000) for name, one in ENCODING.items() if name in CONSERVING},  # type: ignore[call-arg]
    "crossover": Crossover(segments=("weight1",), seed=3),
    "dpsgd": DPSGD(),
    "pairs": NoLoCo(interval=1, outer_lr=1.0, outer_momentum=0.0, segments="blocks"),
}


class Weights(torch.nn.Module):
    """Vectors that differ between ranks by `spread`, and get random gradients."""

    def __init__(self, rank: int, spread: float = 0.0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        common, own = (torch.Generator().manual_seed(seed) for seed in (1, 100 + rank))
        for number, size in enumerate(SIZES):
            value = torch.randn(size, generator=common) + spread * torch.randn(size, generator=own)
            self.register_parameter(f"weight{number}", torch.nn.Parameter(value.to(dtype)))

    def flat(self) -> torch.Tensor:
        return torch.cat([value.detach().double() for value in self.parameters()])

    def draw_gradients(self, rank: int, turn: int) -> None:
        generator = torch.Generator().manual_seed(1000 * turn + rank)
        for value in self.parameters():
            value.grad = torch.randn(value.shape, generator=generator).to(value.dtype)


def wrap(model: Weights, algorithm: AveragingGossip, lr: float = STEP, **options: Any) -> hvd.DistributedOptimizer:
    return hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=lr), model.named_parameters(), algorithm=algorithm, **options
    )


def mean_of_all(model: Weights, name: str) -> torch.Tensor:
    return hvd.allreduce(model.flat(), name=name)


def missed_of_all(optimizer: hvd.DistributedOptimizer, name: str) -> int:
    return int(hvd.allreduce(torch.tensor(optimizer.statistics.missed), op=hvd.Sum, name=name))


@check(least=2, choice=tuple(ALGORITHMS), codec=(Int8(), Int4(32), Float16()))
def the_mean_of_all_workers_stays(seat: Seat, choice: str, codec: Codec) -> None:
    """The mean changes only by the workers' steps, as long as no block is missed."""
    algorithm, model = replace(ALGORITHMS[choice], compression=codec), Weights(0)
    optimizer, wanted = wrap(model, algorithm), Weights(0).flat()
    missed, compared = 0, 0
    for turn in range(6):
        model.draw_gradients(seat.rank, turn)
        before = model.flat() - STEP * torch.cat([value.grad.double() for value in model.parameters()])
        optimizer.step()
        wanted = hvd.allreduce(before, name=f"before {turn}")
        missed_before, missed = missed, missed_of_all(optimizer, f"missed {turn}")
        if missed == missed_before:
            compared += 1
            torch.testing.assert_close(mean_of_all(model, f"mean {turn}"), wanted, atol=1e-6, rtol=0)
    counts = optimizer.statistics
    assert compared >= 3
    assert counts.exchanges == 6 and missed <= 0.05 * int(
        hvd.allreduce(torch.tensor(counts.blocks), op=hvd.Sum, name="blocks")
    )
    assert counts.blocks > 0 or codec == Float16() or choice == "pairs"


@check(least=2, choice=tuple(ALGORITHMS), codec=(Int8(), Int4(32), BFloat16()), dtype=(torch.float32, torch.float64))
def an_exchange_is_nearly_that_without_a_codec(seat: Seat, choice: str, codec: Codec, dtype: torch.dtype) -> None:
    models = [Weights(0, dtype=dtype) for _ in range(2)]
    optimizers = [
        wrap(model, replace(ALGORITHMS[choice], compression=one)) for model, one in zip(models, (codec, None))
    ]
    for model, optimizer in zip(models, optimizers):
        model.draw_gradients(seat.rank, 0)
        optimizer.step()
    moved = max(float(STEP * value.grad.abs().max()) for value in models[0].parameters())
    farthest = float(hvd.allreduce(torch.tensor(moved), op=hvd.Max, name="moved"))
    # An error is half a step, and a step at most 1.25 * margin * (2 * moved) / reach. A change contains fewer than
    # three errors.
    bound = {Int8: 1.5 * 7.5 * farthest / 126, Int4: 1.5 * 5 * farthest / 6, BFloat16: 2**-5}[type(codec)]
    off = float((models[0].flat() - models[1].flat()).abs().max())
    assert missed_of_all(optimizers[0], "missed") == 0
    assert bound / 1000 < off < bound, (off, bound)


@check(least=2, choice=tuple(ALGORITHMS), codec=(Int8(32), Int4()))
def missed_blocks_stay_and_heal(seat: Seat, choice: str, codec: Codec) -> None:
    """Workers start apart, the last one far away, and their steps do not move them. The first estimates are 0."""
    algorithm = replace(ALGORITHMS[choice], compression=codec)
    model = Weights(seat.rank, spread=10.0 if seat.rank == seat.last else 0.1)
    optimizer = wrap(model, algorithm, lr=0.0)
    if choice == "pairs":  # NoLoCo starts from the first rank's values
        optimizer._strategy._mixing._begin_new()
        with torch.no_grad():
            for value, own in zip(model.parameters(), Weights(seat.rank, spread=1.0).parameters()):
                value.copy_(own)
    before, start = model.flat(), hvd.consensus_distance(model)
    model.draw_gradients(seat.rank, 0)
    optimizer.step()
    counts = optimizer.statistics
    assert counts.missed == counts.blocks > 0
    torch.testing.assert_close(model.flat(), before, atol=1e-6 if choice == "pairs" else 0, rtol=0)
    for _ in range(40):
        optimizer.step()
    assert hvd.consensus_distance(model) < 0.1 * start
    missed = counts.missed
    for _ in range(10):
        optimizer.step()
    assert counts.missed - missed <= 0.1 * 10 * counts.blocks / counts.exchanges


@check(least=2, codec=(Int8(), Int4(), Float16()))
def a_nan_reaches_peers_and_is_reported(seat: Seat, codec: Codec) -> None:
    model = Weights(0)
    optimizer = wrap(model, DPSGD(compression=codec), lr=0.0)
    with torch.no_grad():
        if seat.rank == 0:
            model.weight2[700] = float("nan")
    model.draw_gradients(seat.rank, 0)
    text = "1 value of .* not finite in float16, so" if codec == Float16() else "1 block of .* has a NaN"
    with seat.warned(text, when=seat.rank == 0):
        optimizer.step()
    neighbor = min(seat.rank, seat.size - seat.rank) <= 1
    assert bool(model.weight2[700].isnan()) == neighbor
    infinite = int((~model.flat().isfinite()).sum())
    assert infinite == (0 if not neighbor else 1 if codec == Float16() else 128)


@check(least=2)
def a_nan_is_refused(seat: Seat) -> None:
    model = Weights(0)
    optimizer = wrap(model, Crossover(compression="int8"), lr=0.0, check_finite=True)
    with torch.no_grad():
        if seat.rank == seat.last:
            model.weight1[5] = float("inf")
    model.draw_gradients(seat.rank, 0)
    raises(NonFinite, "", optimizer.step)


@check(least=2)
def an_exchange_that_fails_changes_nothing(seat: Seat) -> None:
    """Neither parameters nor estimates change, and a later exchange continues from them."""
    model = Weights(0)
    optimizer = wrap(model, Crossover(compression="int8", segments="model"))
    model.draw_gradients(seat.rank, 0)
    optimizer.step()
    mixing = optimizer._strategy._mixing._compressed
    wanted = model.flat() - STEP * torch.cat([value.grad.double() for value in model.parameters()])
    estimates = [run.distances.clone() for run in mixing._runs]

    def fail(*_: object) -> None:
        raise PeerLost("rank 9 is gone", [9])

    transfer, mixing._transfer = mixing._transfer, fail
    raises(PeerLost, "rank 9", optimizer.step)
    mixing._transfer = transfer
    torch.testing.assert_close(model.flat(), wanted, atol=1e-6, rtol=0)
    assert all(torch.equal(run.distances, one) for run, one in zip(mixing._runs, estimates))
    assert all(one.any() for one in estimates)
    optimizer.step()
    assert optimizer.statistics.exchanges == 2


@check(least=4, within=("allreduce", "leader"), codec=("int8", "int4"))
def members_of_a_group_stay_equal(seat: Seat, within: str, codec: str) -> None:
    if seat.size % 2:
        return
    model = Weights(0)
    optimizer = wrap(model, Crossover(group_size=2, within=within, compression=codec, segments=("weight2",)))
    for turn in range(4):
        model.draw_gradients(seat.rank, turn)
        optimizer.step()
    models = hvd.allgather(model.flat()[None], name="models")
    assert torch.equal(models[0::2], models[1::2])
    assert seat.size == 2 or not torch.equal(models[0], models[2])


@check(least=2, choice=tuple(ALGORITHMS), codec=(Int8(), Int4(), Float16()))
def the_bytes_of_a_codec_are_sent(seat: Seat, choice: str, codec: Codec) -> None:
    """The encoded bytes are sent to each peer, once for each segment."""
    algorithm, model = replace(ALGORITHMS[choice], compression=codec), Weights(0)
    optimizer = wrap(model, algorithm, lr=0.0)
    model.draw_gradients(seat.rank, 0)
    optimizer.step()
    before, earlier = hvd.stats()["bytes_sent"], optimizer.statistics.bytes
    optimizer.step()
    sent = hvd.stats()["bytes_sent"] - before
    assert sent == optimizer.statistics.bytes - earlier
    whole = sum(codec.bytes(size) for size in SIZES)
    peers = len(algorithm.rounds_of(seat.size, 1)[0].destinations(1, 0, seat.rank))
    if choice == "dpsgd":
        assert whole * 0.95 < sent / peers <= whole
    assert sent < (0.6 if isinstance(codec, Float16) else 0.3) * 4 * sum(SIZES) * max(peers, 1)


@check(least=2, algorithm=(Crossover(compression="int8"), NoLoCo(interval=2, compression="int4")))
def training_that_resumes(seat: Seat, algorithm: AveragingGossip) -> None:
    """Training that resumes is the same, bit for bit. Without the estimates it differs a little."""

    def wrapped(model: torch.nn.Module) -> hvd.DistributedOptimizer:
        return hvd.DistributedOptimizer(sgd(model), model.named_parameters(), algorithm=algorithm)

    model = Layers(dtype=torch.float32)
    optimizer = wrapped(model)
    train(seat, model, optimizer, range(6))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    without = copy.deepcopy(saved)
    del without[1]["sordino"]["distances"]
    train(seat, model, optimizer, range(6, 10))
    other, _ = train_resumed(seat, wrapped, saved, range(6, 10), torch.float32)
    assert same_parameters(model, other)
    other, resumed = train_resumed(seat, wrapped, without, range(6, 10), torch.float32)
    assert not same_parameters(model, other) and resumed.statistics.missed <= resumed.statistics.blocks
    assert all(value.isfinite().all() for value in other.parameters())


@check()
def settings_of_gossip(seat: Seat) -> None:
    for kind in map(type, ENCODING.values()):
        assert kind(compression="int4").codec == Int4() and kind().codec is None
        for codec in ("two_bit", "sign", "topk"):
            raises(UsageError, "Use one of Int8, Int4, Float16, BFloat16", kind, compression=codec)
        raises(UsageError, "no such codec", kind, compression="int5")
        raises(UsageError, "needs buffers='local'", kind, compression="int8", buffers="average")
    assert Crossover(compression="int4").written() == "Crossover(compression=Int4(block=128))"
    raises(TypeError, "no setting 'compression'", PushSum, compression="int8")
    raises(UsageError, "Crossover(compression=...)", wrap, Weights(0), Crossover(), compression="int8")
    raises(UsageError, "no statistics", lambda: wrap(Weights(0), Crossover()).statistics)
    if seat.size > 1:
        codec = Int8(64) if seat.rank == 0 else Int8(32)
        raises(ConfigurationMismatch, "Int8", wrap, Weights(0), Crossover(compression=codec))
