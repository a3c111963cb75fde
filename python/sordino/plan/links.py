"""Measurement of alpha and beta of the real transport.

Exchanges of several sizes are run within and between nodes, and a line is fitted to their times.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import torch

import sordino.torch as hvd
from sordino._core import MOST_DOUBLED, Exponential, Layout
from sordino.plan.costs import Line, Load, Rates
from sordino.runtime.context import Context, current
from sordino.runtime.exchange.flat_buffer import FlatBuffer
from sordino.runtime.exchange.groups import new_channel, part_of
from sordino.runtime.tensors import dtype_code
from sordino.timing import Participants, time_block

_SMALL = 4096  # bytes; the time of so small an exchange is latency
_SEGMENT = 4 * 1024 * 1024  # bytes
_RING = 4 * MOST_DOUBLED  # bytes per rank of a node, enough for a ring
_TENSORS = 64
_MOST_COPIED = 64 * 1024 * 1024  # bytes, more than caches hold
_LEAST, _MOST = 3, 20  # runs of one size


def nodes_of_ranks() -> list[int]:
    """Return the node of each rank, numbered from 0."""
    numbers: dict[int, int] = {}
    return [numbers.setdefault(node, len(numbers)) for node in current().world.nodes]


def measure(count: int, budget: float) -> tuple[Rates, list[tuple[str, int, float]]]:
    """Return the costs on this machine, and the samples behind them: (place, bytes, seconds). Collective.

    All nodes exchange at the same time, each rank with its neighbors on a ring. A byte takes longer if the data exceed
    the caches. So the sizes are the model's, half of it, and a small one.

    Args:
        count: bytes of the model.
        budget: approximate seconds to spend. Sizes that would take longer are left out.
    """
    context, nodes = current(), nodes_of_ranks()
    everywhere = [[rank for rank, other in enumerate(nodes) if other == node] for node in range(max(nodes) + 1)]
    samples: list[tuple[str, int, float]] = []
    lines: dict[str, Line | None] = {"inside": None, "across": None}
    most = max(len(ranks) for ranks in everywhere)
    shared = [ranks for ranks in everywhere if len(ranks) == most > 1]
    places = {"inside": shared, "across": [[ranks[0] for ranks in everywhere]] if len(everywhere) > 1 else []}
    for place, sets in places.items():
        if not sets:
            continue
        points = []
        for size, seconds in _exchanges(context, place, sets, _sizes(count), budget / 2):
            load = Load(nodes)
            load.exchange(sets, Exponential(len(sets[0]), {0: 1}), [size])
            points.append((load.link if place == "across" else max(load.memory), seconds))
            samples.append((place, size, seconds))
        lines[place] = fit(points)
    if not shared:
        lines["inside"] = _copies(count)
    across = lines["across"]
    agreement = _agreement(nodes, across)
    hop = 0.0 if across is None else _hop(nodes, across, agreement)
    return Rates(lines["inside"], across, agreement, hop, _handling(agreement)), samples


def fit(points: Sequence[tuple[float, float]]) -> Line:
    """Return the line alpha + beta x through points (x, seconds) with the least relative errors; neither is below 0.

    If the best alpha is negative, small messages are faster than in proportion, because a switch lets them through at
    once. Then alpha is 0, and the large messages determine beta.

    Raises:
        ValueError: fewer than two points.
    """
    if len(points) < 2:
        raise ValueError(f"a line needs two points, not {len(points)}")
    x, seconds = np.array(points).T
    alpha, beta = np.linalg.lstsq(np.stack([1 / seconds, x / seconds], 1), np.ones(len(x)), rcond=None)[0]
    if alpha < 0:
        alpha, beta = 0.0, float((x * seconds).sum() / (x * x).sum())
    elif beta < 0:
        alpha, beta = float((1 / seconds).sum() / (1 / seconds**2).sum()), 0.0
    return Line(float(alpha), float(beta))


def _sizes(count: int) -> list[int]:
    return sorted({_SMALL, *(max(4, count // part // 4 * 4) for part in (2, 1))})


def _layout(count: int) -> Layout:
    """Return a layout of `count` bytes, in segments like a model's."""
    code = dtype_code(torch.empty(0))
    pieces = [min(_SEGMENT, count - begin) // 4 for begin in range(0, count, _SEGMENT)]
    return Layout([(f"probe {k}", code, (piece,)) for k, piece in enumerate(pieces)], groups=list(range(len(pieces))))


def _exchanges(
    context: Context, place: str, sets: Sequence[Sequence[int]], sizes: Sequence[int], budget: float
) -> list[tuple[int, float]]:
    """Return bytes and seconds of exchanges, until the budget is spent. Collective."""
    idle = [rank for rank in range(context.size) if not any(rank in ranks for ranks in sets)]
    parts = [*map(list, sets), *([idle] if idle else [])]
    mine = part_of(context, hvd.global_process_set, (f"plan.{place}", 0), parts)
    channel = new_channel(context, mine)
    topology = Exponential(len(sets[0]), {0: 1})
    participants = Participants(context.rank, context.size)
    found: list[tuple[int, float]] = []
    begin = time.perf_counter()
    for count in sizes:
        values = FlatBuffer(context, _layout(count))
        channel.compare([values])

        def run(values: FlatBuffer = values) -> None:
            if context.rank not in idle:
                channel.start(f"plan.{place}", topology, values, wait=True).wait()

        first, spent = participants.maximum(
            np.array([time_block(run, participants, 2)[1], time.perf_counter() - begin])
        )
        if len(found) >= 2 and spent + _LEAST * first > budget:
            break
        runs = int(np.clip((budget - spent) / len(sizes) / first, _LEAST, _MOST))
        found.append((count, float(np.median(participants.maximum(time_block(run, participants, runs))))))
    return found


def _copies(count: int) -> Line:
    """Return the cost of a byte that a rank reads or writes alone, for nodes of one rank each."""
    source = torch.ones(max(1, min(count, _MOST_COPIED) // 4))
    target = torch.empty_like(source)
    return Line(0.0, _median(lambda: target.copy_(source)) / (2 * source.nbytes))


def _median(run: Callable[[], object]) -> float:
    """Return the median seconds of a short run on the slowest rank. Collective."""
    participants = Participants(hvd.rank(), hvd.size())
    time_block(run, participants, 5)
    return float(np.median(participants.maximum(time_block(run, participants, 30))))


def _all_reduce(values: torch.Tensor, name: str) -> float:
    """Return the seconds of an all-reduce that is negotiated each time, because its names are new. Collective.

    An optimizer negotiates buckets that are in flight together.
    """
    number = itertools.count()
    return _median(lambda: hvd.synchronize(hvd.allreduce_async_(values, name=f"{name}.{next(number)}")))


def _agreement(nodes: Sequence[int], across: Line | None) -> float:
    """Return the seconds that a small operation takes in addition to its messages. Collective."""
    seconds = _all_reduce(torch.zeros(1), "plan.agreement")
    messages = math.ceil(math.log2(max(nodes) + 1)) * across.alpha if across is not None else 0.0
    return max(seconds - messages, 0.0)


def _hop(nodes: Sequence[int], across: Line, agreement: float) -> float:
    """Return the seconds per hop that a short ring takes in addition to its bytes. Collective."""
    size = _RING * max(Counter(nodes).values())
    seconds = _all_reduce(torch.zeros(size // 4), "plan.ring")
    load = Load(nodes)
    load.all_reduce([list(range(len(nodes)))], size)
    return max(seconds - agreement - load.link * across.beta, 0.0) / load.hops


def _handling(agreement: float) -> float:
    """Return the seconds per tensor that averaging gradients takes if there are no data to move. Collective."""
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(_TENSORS)]
    for parameter in parameters:
        parameter.grad = torch.zeros(1)
    optimizer = hvd.DistributedOptimizer(idle_sgd(parameters))
    return max(_median(optimizer.step) - agreement, 0.0) / _TENSORS


def idle_sgd(parameters: Sequence[torch.nn.Parameter]) -> torch.optim.SGD:
    """Return an optimizer whose step does nothing, so that a step of `DistributedOptimizer` is communication only."""
    optimizer = torch.optim.SGD(parameters, lr=0.0)
    optimizer.step = lambda closure=None: None  # type: ignore[assignment, misc]
    return optimizer
