"""Gossip algorithms: the parameters of all ranks after an exchange, against a float64 model of the topology."""

from __future__ import annotations

import math
import random
import time

import pytest
import torch
from algorithm_table import GOSSIPING, MIXING, often

import sordino.torch as hvd
from checks.models import batch, make_model, part
from checks.registry import Seat, check
from sordino.algorithms import (
    DPSGD,
    AllReduce,
    Crossover,
    ElasticAveraging,
    PushSum,
    SegmentedGossip,
)
from sordino.algorithms.gossip import Gossip, MixingGossip
from sordino.errors import UsageError
from sordino.runtime.exchange.flat_buffer import segment_numbers

CHOICES: dict[str, MixingGossip] = {
    **MIXING,  # type: ignore[dict-item]
    "crossover": Crossover(seed=3),
    "crossover-model": Crossover(segments="model"),
    "crossover-bytes": Crossover(segments=700),
    "crossover-patterns": Crossover(segments=("body.0.*", "*odd*")),
    "dpsgd-blocks": DPSGD(segments="blocks"),
}
MORE: dict[str, Gossip] = {
    **{name: often(one) for name, one in GOSSIPING.items() if name not in MIXING},  # type: ignore[dict-item]
    "push-sum-overlap": PushSum(overlap=2),
}


class Strange(torch.nn.Module):
    """Model with odd sizes, several dtypes in one block, other memory orders, an empty parameter and statistics."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(rank)

        def draw(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(*shape, generator=generator))

        self.body = torch.nn.ModuleList(torch.nn.ParameterDict({"w": draw(7, 13), "b": draw(3)}) for _ in range(3))
        self.odd = torch.nn.ParameterDict({"wide": draw(11).double(), "short": draw(5).half(), "none": draw(0)})
        self.image = torch.nn.Parameter(draw(4, 3, 5, 5).detach().contiguous(memory_format=torch.channels_last))
        self.big = draw(70001)
        self.norm = torch.nn.BatchNorm1d(6)
        self.norm.running_mean.copy_(draw(6).detach())


def wrap(model: torch.nn.Module, algorithm: Gossip, lr: float = 0.0, **options: object) -> hvd.DistributedOptimizer:
    return hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=lr), model.named_parameters(), algorithm=algorithm, **options
    )


def models_of_all(size: int) -> list[dict[str, torch.Tensor]]:
    return [{name: p.detach().double() for name, p in Strange(rank).named_parameters()} for rank in range(size)]


def mixed(algorithm: MixingGossip, values: list[dict[str, torch.Tensor]], turn: int) -> list[dict[str, torch.Tensor]]:
    """Return all ranks' parameters after the exchange, in float64."""
    names = list(values[0])
    kinds = dict(Strange(0).named_parameters())
    numbers = segment_numbers(names, [kinds[n].numel() * kinds[n].element_size() for n in names], algorithm.segments)
    for topology in algorithm.rounds_of(len(values), max(numbers) + 1):
        after = []
        for rank in range(len(values)):
            result = {}
            for name, number in zip(names, numbers):
                sources, keeps_own, scale = topology.row(turn, number, rank)
                taken = [*sources, rank] if keeps_own else sources
                result[name] = scale * sum(values[source][name] for source in taken)
            after.append(result)
        values = after
    return values


def tolerance(dtype: torch.dtype, turns: int) -> float:
    return turns * 4 * torch.finfo(dtype).eps


@check(least=2, choice=tuple(CHOICES))
def an_exchange_is_the_topologys(seat: Seat, choice: str) -> None:
    algorithm, model = CHOICES[choice], Strange(seat.rank)
    strides = {name: p.stride() for name, p in model.named_parameters()}
    optimizer, wanted = wrap(model, algorithm), models_of_all(seat.size)
    sums = {name: sum(values[name] for values in wanted) for name in wanted[0]}
    for turn in range(4):
        optimizer.step()
        wanted = mixed(algorithm, wanted, turn)
        for name, parameter in model.named_parameters():
            slack = tolerance(parameter.dtype, turn + 1)
            torch.testing.assert_close(parameter.double(), wanted[seat.rank][name], atol=slack * 4, rtol=slack)
            assert parameter.stride() == strides[name]
    if not isinstance(algorithm, SegmentedGossip):
        mean = hvd.average_parameters(model)
        for name, parameter in model.named_parameters():
            slack = tolerance(parameter.dtype, 8) * 4
            torch.testing.assert_close(mean[name].double() * seat.size, sums[name], atol=slack * seat.size, rtol=slack)


@check(least=2)
def one_copy_of_each_segment_is_sent(seat: Seat) -> None:
    model = Strange(seat.rank)
    optimizer = wrap(model, Crossover())
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    optimizer.step()  # the first exchange connects NCCL
    for _ in range(3):
        before = hvd.stats()["bytes_sent"]
        optimizer.step()
        assert hvd.stats()["bytes_sent"] - before == size


@check(least=2)
def two_workers_are_equal_after_one_exchange(seat: Seat) -> None:
    pair = hvd.add_process_set([0, 1]) if seat.size > 2 else hvd.global_process_set
    if pair.included():
        model = Strange(seat.rank)
        wrap(model, Crossover(), process_set=pair).step()
        mean = hvd.average_parameters(model, process_set=pair)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter, mean[name], atol=0, rtol=0)


def train(seat: Seat, model: torch.nn.Module, optimizer: hvd.DistributedOptimizer, steps: int = 5) -> None:
    for turn in range(steps):
        inputs, targets = part(batch(4 * seat.size, turn, torch.float32), seat.rank, seat.size)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()


def linear(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return make_model("small", 3, dtype)


@check(least=2)
def one_group_is_allreduce(seat: Seat) -> None:
    models = [linear(), linear(), linear()]
    one_group = Crossover(group_size=seat.size)
    led = Crossover(group_size=seat.size, within="leader")
    for model, algorithm in zip(models, (AllReduce(), one_group, led)):
        train(seat, model, wrap(model, algorithm, lr=0.1))
    for wanted, *others in zip(*(model.parameters() for model in models)):
        for other in others:
            assert torch.equal(wanted, other)
        seat.same("parameter", wanted)


@check(least=4)
def a_leader_that_broadcasts_is_like_allreduce_in_the_group(seat: Seat) -> None:
    if seat.size % 2:
        with pytest.raises(UsageError, match=r"group_size=2.*does not divide"):
            wrap(linear(), Crossover(group_size=2))
        return
    models = [linear(), linear()]
    for model, within in zip(models, ("allreduce", "leader")):
        train(seat, model, wrap(model, Crossover(group_size=2, within=within), lr=0.1))
    for mine, other in zip(*(model.parameters() for model in models)):
        assert torch.equal(mine, other)
        everybody = hvd.allgather(mine.detach().reshape(1, -1))
        leaders = [rank - rank % 2 for rank in range(seat.size)]
        assert torch.equal(everybody, everybody[leaders])


@check(least=2, choice=tuple(choice for choice in (*CHOICES, *MORE) if choice != "crossover-patterns"))
def workers_agree_on_least_squares(seat: Seat, choice: str) -> None:
    """Every worker has its own data. With a falling step size all workers reach the solution for all data."""
    generator = torch.Generator().manual_seed(11)
    inputs = torch.randn(seat.size, 8, 3, generator=generator, dtype=torch.float64)
    targets = torch.randn(seat.size, 8, 1, generator=generator, dtype=torch.float64)
    model = torch.nn.Linear(3, 1, bias=False).double()
    algorithm = (CHOICES | MORE)[choice]
    optimizer = wrap(model, algorithm, lr=0.1)
    for step in range(400):
        optimizer.param_groups[0]["lr"] = 0.2 / (1 + step / 20)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs[seat.rank]), targets[seat.rank]).backward()
        optimizer.step()
    solution = torch.linalg.lstsq(inputs.reshape(-1, 3), targets.reshape(-1, 1)).solution.T
    # SegmentedGossip does not keep the sum, so it only comes near the solution.
    slack = 0.15 if isinstance(algorithm, SegmentedGossip) else 0.02
    torch.testing.assert_close(hvd.average_parameters(model)["weight"], solution, atol=slack, rtol=0)
    # A center draws the workers by only a part of their distance, so they stay farther apart.
    assert hvd.consensus_distance(model) < (0.15 if isinstance(algorithm, ElasticAveraging) else slack)


@check(least=2)
def exchanges_come_every_interval(seat: Seat) -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, float(seat.rank))
    optimizer = wrap(model, Crossover(interval=3))
    seen = []
    for _ in range(6):
        optimizer.step()
        seen.append(model.weight.item())
    assert seen[0] == seen[1] == seat.rank and seen[2] == seen[3] == seen[4] != seat.rank, seen
    saved = optimizer.state_dict()
    assert saved["sordino"] == {"algorithm": "Crossover", "steps": 6, "round": 2}, saved["sordino"]
    torch.optim.SGD(model.parameters(), lr=0.0).load_state_dict(saved)
    # An optimizer that loads the state continues with the same peers.
    twin = torch.nn.Linear(1, 1, bias=False)
    twin.load_state_dict(model.state_dict())
    resumed = wrap(twin, Crossover(interval=3))
    resumed.load_state_dict(saved)
    for _ in range(3):
        optimizer.step()
        resumed.step()
    assert torch.equal(model.weight, twin.weight)
    optimizer.set_backward_passes_per_step(1)
    assert optimizer.state_dict()["sordino"] == {**saved["sordino"], "steps": 9, "round": 3}


@check(least=2)
def a_slow_worker_never_shows_half_an_update(seat: Seat) -> None:
    """All elements of a rank's parameters are equal before every exchange, so they must be equal after it."""
    model = torch.nn.ParameterList([torch.full((300_007,), float(seat.rank)), torch.full((3, 7), float(seat.rank))])
    optimizer = wrap(model, Crossover(segments="model", seed=9))
    pause = random.Random(seat.rank)
    for turn in range(30):
        time.sleep(pause.random() * 0.004)
        with torch.no_grad():
            for parameter in model:
                parameter.add_(float(turn * seat.rank))
        optimizer.step()
        first = model[0][0]
        assert all(bool((parameter == first).all()) for parameter in model), turn


@check(least=2)
def buffers_are_averaged_where_asked_for(seat: Seat) -> None:
    model = Strange(seat.rank)
    optimizer = wrap(model, DPSGD(buffers="average"), named_buffers=model.named_buffers())
    start = [Strange(rank).norm.running_mean.double() for rank in range(seat.size)]
    optimizer.step()
    sources, _, scale = DPSGD().rounds_of(seat.size, 1)[0].row(0, 0, seat.rank)
    wanted = scale * sum(start[rank] for rank in (*sources, seat.rank))
    torch.testing.assert_close(model.norm.running_mean.double(), wanted, atol=1e-6, rtol=0)
    other = Strange(seat.rank)
    wrap(other, DPSGD()).step()
    torch.testing.assert_close(other.norm.running_mean.double(), start[seat.rank], atol=0, rtol=1e-7)


def with_a_scaler(seat: Seat) -> tuple[torch.nn.Linear, hvd.DistributedOptimizer, torch.amp.GradScaler]:
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.constant_(model.weight, float(seat.rank))
    return model, wrap(model, Crossover(), lr=1.0), torch.amp.GradScaler("cpu", init_scale=4.0)


@check(least=2)
def an_infinite_gradient_of_one_worker_stops_nobody(seat: Seat) -> None:
    model, optimizer, scaler = with_a_scaler(seat)
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    if seat.rank == 0:
        model.weight.grad.fill_(math.inf)
    scaler.step(optimizer)
    scaler.update()
    total = hvd.average_parameters(model)["weight"] * seat.size
    # All ranks but rank 0 have stepped by -1 with the scale removed, and all have exchanged.
    wanted = sum(range(seat.size)) - (seat.size - 1)
    torch.testing.assert_close(total, torch.full((1, 2), float(wanted)))
    assert scaler.get_scale() == (2.0 if seat.rank == 0 else 4.0)


@check(least=2)
def a_worker_without_gradients_exchanges_under_a_scaler(seat: Seat) -> None:
    model, optimizer, scaler = with_a_scaler(seat)
    if seat.rank == 0:
        scaler.scale(torch.zeros(1))
    else:
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.step(optimizer)
    total = hvd.average_parameters(model)["weight"] * seat.size
    torch.testing.assert_close(total, torch.full((1, 2), float(sum(range(seat.size)) - (seat.size - 1))))


@check(least=2)
def parameters_that_were_replaced_come_back(seat: Seat) -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    optimizer = wrap(model, DPSGD())
    model.weight.data = torch.full((1, 2), float(seat.rank))
    optimizer.step()
    sources, _, scale = DPSGD().rounds_of(seat.size, 1)[0].row(0, 0, seat.rank)
    torch.testing.assert_close(model.weight.data, torch.full((1, 2), scale * sum((*sources, seat.rank))))
    model.weight.data = torch.zeros(1, 2, dtype=torch.float64)
    with pytest.raises(UsageError, match=r"from torch\.float32.*to torch\.float64"):
        optimizer.step()


@check(least=2)
def wrong_use_is_refused(seat: Seat) -> None:
    model = linear()
    for algorithm, options, text in (
        (Crossover(segments=("nothing*",)), {}, r"'nothing\*' matches no parameter"),
        (DPSGD(buffers="average"), {}, "needs named_buffers"),
        (DPSGD(), {"named_buffers": []}, "named_buffers has no effect"),
        (DPSGD(), {"op": hvd.Sum}, "op= needs AllReduce"),
        (DPSGD(), {"compression": hvd.Compression.fp16}, "compression= has no effect"),
        (SegmentedGossip(replicas=seat.size), {}, f"replicas={seat.size}"),
        (Crossover(roulette=[[0.0]]), {}, "weights, not 1"),
    ):
        with pytest.raises(UsageError, match=text):
            wrap(model, algorithm, **options)
    optimizer = wrap(model, DPSGD())
    with pytest.raises(UsageError, match=r"join\(\) cannot replace a worker of DPSGD"):
        hvd.join()
    optimizer.step()


@check(worlds=("sim-1",))
def one_worker_trains_alone(seat: Seat) -> None:
    for algorithm in (CHOICES | MORE).values():
        model, twin = linear(), linear()
        train(seat, model, wrap(model, algorithm, lr=0.1))
        train(seat, twin, wrap(twin, AllReduce(), lr=0.1))
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters()))
