"""Parameter skipping against averaging of all tensors, against local SGD, and with hand-made gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import sordino.torch as hvd
from checks.odd import OPTIMIZERS, Odd, step, wrap
from checks.registry import Seat, check, skipping_on_servers
from sordino.algorithms import CaPS, LocalSGD
from sordino.algorithms.caps.items import Items
from sordino.algorithms.caps.parameter_server import ParameterServer
from sordino.runtime.context import current
from sordino.runtime.exchange.flat_buffer import ParameterBuffer
from sordino.runtime.process_set import global_process_set

DETECTORS = ("naive", "random", "history", "movement")
NEVER = 100.5  # percent


def skipping(**settings: Any) -> CaPS:
    """Return the algorithm for this world, with dedicated servers if it has any."""
    if current().helpers is not None:
        return skipping_on_servers(current().helpers.algorithm.servers, **settings)
    return CaPS(**settings)


def states(optimizer: hvd.DistributedOptimizer) -> list[int]:
    """Return for each item the number of consecutive steps in which it was skipped."""
    skipped: list[int] = optimizer.state_dict()["sordino"]["skipped"].tolist()
    return skipped


class Planted:
    """Tensors with hand-made gradients, so that a test knows which elements a step moves."""

    def __init__(
        self, algorithm: CaPS, *sizes: int, lr: float = 0.5, frozen: Sequence[int] = (), **options: Any
    ) -> None:
        self.tensors = [torch.nn.Parameter(torch.arange(size, dtype=torch.float32) + 1) for size in sizes]
        for index in frozen:
            self.tensors[index].requires_grad_(False)
        names = [f"t{k}" for k in range(len(sizes))]
        inner = torch.optim.SGD(self.tensors, lr=lr, **options)
        self.optimizer = hvd.DistributedOptimizer(inner, list(zip(names, self.tensors)), algorithm=algorithm)

    def step(self, *gradients: Callable[[torch.Tensor], torch.Tensor] | float) -> None:
        """Take a step. A number stands for a gradient with this value in all elements."""
        for tensor, gradient in zip(self.tensors, gradients):
            if callable(gradient):
                tensor.grad = gradient(torch.zeros_like(tensor))
            else:
                tensor.grad = torch.full_like(tensor, gradient)
        self.optimizer.step()


def first(count: int, value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a gradient of `value` in the first `count` elements."""

    def fill(gradient: torch.Tensor) -> torch.Tensor:
        gradient[:count] = value
        return gradient

    return fill


# ---- nothing skipped, everything skipped -----------------------------------------------------------------------------


def trained(seat: Seat, algorithm: Any, steps: int, name: str) -> list[torch.nn.Parameter]:
    model = Odd()
    make = OPTIMIZERS[name]
    optimizer = wrap(model, algorithm, lambda p: make([{"params": p[:2]}, {"params": p[2:], "lr": 0.02}]))
    for turn in range(steps):
        step(seat, model, optimizer, turn)
    return list(model.parameters())


@check(least=2, detector=DETECTORS, granularity=("tensor", "block"), name=("momentum", "adam"))
def nothing_skipped_is_averaging_bit_for_bit(seat: Seat, detector: str, granularity: str, name: str) -> None:
    algorithm = CaPS(detector, NEVER, granularity=granularity, block_bytes=64)
    wanted = trained(seat, LocalSGD(interval=1, exchange="allreduce"), 8, name)
    for mine, other in zip(trained(seat, algorithm, 8, name), wanted):
        assert torch.equal(mine, other)
        seat.same("parameter", mine)


@check(least=2, helpers=("", "servers"), granularity=("tensor", "block"))
def a_parameter_server_averages(seat: Seat, granularity: str) -> None:
    settings: dict[str, Any] = {"threshold": NEVER, "granularity": granularity, "block_bytes": 64}
    served = (
        [skipping(exchange="parameter-server", **settings)] if current().helpers is None else [skipping(**settings)]
    )
    if current().helpers is None:
        served += [CaPS(exchange="parameter-server", servers=seat.size - 1, **settings)]
    wanted = trained(seat, LocalSGD(interval=1, exchange="allreduce"), 8, "momentum")
    for algorithm in served:
        for mine, other in zip(trained(seat, algorithm, 8, "momentum"), wanted):
            torch.testing.assert_close(mine, other, atol=2e-6, rtol=2e-5)
            seat.same("parameter", mine)


@check(least=2, helpers=("", "servers"), interval=(1, 3))
def everything_skipped_is_local_sgd(seat: Seat, interval: int) -> None:
    """A probe comes after `interval` skipped steps, however tensors move. In between, each worker trains by itself."""
    mine = trained(seat, skipping(threshold=0, probe_interval=interval), 9, "momentum")
    wanted = trained(seat, LocalSGD(interval + 1, exchange="allreduce"), 9, "momentum")
    for one, other in zip(mine, wanted):
        if current().helpers is None:
            assert torch.equal(one, other)
        else:
            torch.testing.assert_close(one, other, atol=2e-6, rtol=2e-5)


@check(least=2, helpers=("", "servers"), detector=("naive", "history"))
def at_a_hundred_percent_nothing_is_lost(seat: Seat, detector: str) -> None:
    """Elements that no worker has changed need not be averaged. Here the updates are sparse, at different places on
    each worker."""
    results = []
    for threshold in (100, NEVER):
        settings: dict[str, Any] = {
            "granularity": "block",
            "block_bytes": 64,
            "sample_ratio": 1.0,
            "survey_interval": 2,
        }
        planted = Planted(skipping(detector=detector, threshold=threshold, **settings), 1000, 77)
        for turn in range(6):
            generator = torch.Generator().manual_seed(10 * turn + seat.rank)
            places = torch.randint(1000, (5,), generator=generator)
            planted.step(lambda zeros, places=places: zeros.index_fill(0, places, 1.0), float(turn == 3))
        results.append(planted)
    sparse, whole = results
    for mine, other in zip(sparse.tensors, whole.tensors):
        # With 3 or 5 workers the average of equal values may differ from them in the last bit.
        torch.testing.assert_close(mine, other, atol=0, rtol=1e-6)
        seat.same("parameter", mine)
    sent, unskipped = (one.optimizer.statistics for one in results)
    assert sum(one.steps for one in sent.points) == 0  # no point is complete yet
    sparse.optimizer.report_metric(1)
    whole.optimizer.report_metric(1)
    assert unskipped.bytes_sent == unskipped.bytes_unskipped == 6 * 4 * 1077
    assert 0 < sent.bytes_sent < 0.8 * sent.bytes_unskipped


# ---- skipping --------------------------------------------------------------------------------------------------------


@check(least=2, helpers=("", "servers"), detector=DETECTORS, exchange=("allreduce", "parameter-server"))
def all_skip_the_same(seat: Seat, detector: str, exchange: str) -> None:
    """All workers skip the same tensors, however differently their copies move."""
    settings = {} if current().helpers is not None else {"exchange": exchange}
    planted = Planted(
        skipping(detector=detector, threshold=35, probe_interval=3, sample_ratio=0.2, **settings), *[53] * 9
    )
    seen = set()
    for turn in range(25):
        generator = torch.Generator().manual_seed(100 * turn + seat.rank)
        planted.step(*[first(int(torch.randint(40, (1,), generator=generator)), 0.1) for _ in range(9)])
        skipped = states(planted.optimizer)
        seat.same("skipped", skipped)
        for tensor, since in zip(planted.tensors, skipped):
            if since == 0:
                seat.same("sent", tensor)
        seen.update(skipped)
    # With these two detectors not every count of skipped steps is sure to occur: on many workers, the most active
    # elements rarely stand still everywhere at once, and the workers rarely agree on the tensors that move least.
    assert seen <= {0, 1, 2, 3} if detector in ("history", "movement") else seen == {0, 1, 2, 3}


@check(least=2, helpers=("", "servers"))
def what_one_worker_moves_is_sent(seat: Seat) -> None:
    planted = Planted(skipping(threshold=50), 40, 40)
    before = planted.tensors[1].detach().clone()
    planted.step(0.0, first(40, 1.0) if seat.rank == 0 else 0.0)
    assert states(planted.optimizer) == [1, 0]
    torch.testing.assert_close(planted.tensors[1], before - 0.5 / seat.size)


@check(least=2, helpers=("", "servers"), detector=DETECTORS)
def a_tensor_that_moves_again_is_sent_at_once(seat: Seat, detector: str) -> None:
    planted = Planted(
        skipping(detector=detector, threshold=90, probe_interval=100, survey_interval=2, sample_ratio=0.3), 64, 64
    )
    for _ in range(5):
        planted.step(0.0, 1.0)
    assert states(planted.optimizer) == [5, 0]
    before = planted.tensors[0].detach().clone()
    planted.step(1.0 + seat.rank, 0.0)
    assert states(planted.optimizer) == [0, 0 if detector == "movement" else 1]  # a moving average falls slowly
    torch.testing.assert_close(planted.tensors[0], before - 0.5 * (1 + (seat.size - 1) / 2))


@check(least=2, helpers=("", "servers"))
def what_moves_least_is_skipped(seat: Seat) -> None:
    """The tensor that moves least is skipped even if all its elements move. No movement is lost, and probes come as
    with other detectors."""
    planted = Planted(skipping(detector="movement", threshold=60, probe_interval=3), 50, 50, 50)
    starts = [tensor.detach().clone() for tensor in planted.tensors]
    seen = []
    for _ in range(8):
        planted.step(1.0, 0.01 * (seat.rank + 1), 0.1)
        seen.append(states(planted.optimizer))
    assert seen == [[0, turn % 4, 0] for turn in (1, 2, 3, 4, 5, 6, 7, 8)]
    for start, tensor, gradient in zip(starts, planted.tensors, (1.0, 0.01 * (seat.size + 1) / 2, 0.1)):
        torch.testing.assert_close(tensor, start - 8 * 0.5 * gradient)
        seat.same("parameter", tensor)


@check(least=2, helpers=("", "servers"))
def probes_bring_copies_together(seat: Seat) -> None:
    """A tensor that moves a little on every worker is skipped, trained by each worker alone, and averaged at the
    probe."""
    planted = Planted(skipping(threshold=50, probe_interval=3), 40)
    start = planted.tensors[0].detach().clone()
    for turn in range(8):
        planted.step(first(10, float(seat.rank)))
        own, mean = 0.5 * seat.rank, 0.5 * (seat.size - 1) / 2
        together, alone = turn // 4 * 4 + (turn % 4 == 3) * 4, (turn + 1) % 4
        wanted = start.clone()
        wanted[:10] -= together * mean + alone * own
        torch.testing.assert_close(planted.tensors[0], wanted)
        assert states(planted.optimizer) == [alone]
    planted.step(first(10, float(seat.rank)))
    planted.optimizer.flush()
    assert states(planted.optimizer) == [0]
    seat.same("flushed", planted.tensors[0])


@check(least=2, helpers=("", "servers"))
def blocks_are_skipped_each_by_itself(seat: Seat) -> None:
    planted = Planted(skipping(threshold=100, granularity="block", block_bytes=64), 100)
    planted.step(first(17, 1.0))  # the first block of 16 elements, and the second
    assert states(planted.optimizer) == [0, 0, 1, 1, 1, 1, 1]
    planted.optimizer.report_metric(0.0)
    (point,) = planted.optimizer.statistics.points
    assert point.bytes_sent == 2 * 64 and point.bytes_unskipped == 400
    assert point.ratios == pytest.approx([0.83]) and point.skipped == pytest.approx([1 - 128 / 400])


@check(least=2, helpers=("", "servers"), exchange=("allreduce", "parameter-server"))
def what_is_skipped_is_not_sent(seat: Seat, exchange: str) -> None:
    """A skipped tensor is not sent, by the transport's own counters."""
    settings: dict[str, Any] = {} if current().helpers is not None else {"exchange": exchange}
    size = 40_000
    planted = Planted(skipping(threshold=100, probe_interval=50, **settings), size, size, 10)
    sent = []
    for gradients in ((1.0, 1.0, 1.0), (1.0, 1.0, 1.0), (1.0, 0.0, 1.0), (0.0, 0.0, 0.0)):
        before = hvd.stats()["bytes_sent"]
        planted.step(*gradients)
        sent.append(hvd.allreduce(torch.tensor(hvd.stats()["bytes_sent"] - before), op=hvd.Sum, name="sent").item())
    # Copies of the vector sent by all workers together: 2 (N - 1) by all-reduce, and 2 N with servers that do not train
    # (N there and N back). A server that reaches several workers of another node at once sends less.
    copies = 2 * (seat.size - 1) if current().helpers is None else 2 * seat.size
    if exchange == "allreduce" and current().helpers is None:
        assert sent[1] >= 4 * (2 * size + 10) * copies
    overhead = 100 * seat.size**2
    assert sent[1] <= 4 * (2 * size + 10) * copies + overhead
    # Servers on a node of their own send more than others, so the location of parts matters a little.
    assert sent[2] <= 1.1 * sent[1] * (size + 10) / (2 * size + 10) + overhead
    assert sent[3] <= overhead


@check(least=2)
def servers_share_the_load_anew(seat: Seat) -> None:
    """Tensors are assigned to servers anew in each step, by size among the tensors to send. A large tensor is cut."""
    tensors = [torch.zeros(count) for count in (700, 500, 400, 300, 300, 200, 100, 50)]
    arena = ParameterBuffer(current(), [f"t{k}" for k in range(8)], tensors, "model")
    items = Items.of(arena, None)
    algorithm = CaPS(exchange="parameter-server", servers=2)
    server = ParameterServer(current(), global_process_set, algorithm, items, arena)
    chosen = torch.ones(8, dtype=torch.bool)
    assert server.loads(chosen.numpy()) == [4 * 1300, 4 * 1250]
    chosen[0] = False
    assert server.loads(chosen.numpy()) == [4 * 950, 4 * 900]
    chosen[1:5] = False
    assert server.loads(chosen.numpy()) == [4 * 200, 4 * 150]
    large = ParameterBuffer(current(), ["large", "small"], [torch.zeros(1_000_003), torch.zeros(5)], "model")
    every = Items.of(large, None)
    loads = ParameterServer(current(), global_process_set, algorithm, every, large).loads(np.ones(2, dtype=bool))
    assert sum(loads) == 4 * 1_000_008 and max(loads) <= 1.1 * 2 * 1_000_008


@check(least=2, helpers=("", "servers"))
def optimizers_lose_nothing(seat: Seat) -> None:
    """Momentum, weight decay and parameter groups work as without other workers while tensors are skipped."""
    tensors = [torch.nn.Parameter(torch.linspace(1, 2, count, dtype=torch.float64)) for count in (7, 5)]
    alone = [torch.nn.Parameter(tensor.detach().clone()) for tensor in tensors]

    def make(parameters: list[torch.nn.Parameter]) -> torch.optim.SGD:
        groups = [{"params": parameters[:1], "momentum": 0.5}, {"params": parameters[1:], "weight_decay": 0.1}]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    inner, plain = make(tensors), make(alone)
    optimizer = hvd.DistributedOptimizer(
        inner, list(zip("ab", tensors)), algorithm=skipping(threshold=0, probe_interval=1000)
    )
    for turn in range(6):
        for one, other in zip(tensors, alone):
            one.grad = torch.full_like(one, seat.rank + turn + 1.0)
            other.grad = one.grad.clone()
        optimizer.step()
        plain.step()
    for one, other in zip(tensors, alone):
        assert torch.equal(one, other)
        assert torch.equal(inner.state[one]["momentum_buffer"], plain.state[other]["momentum_buffer"])
