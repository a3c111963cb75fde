"""The manager of scheduled pull gives all pairs of workers equal chances, in whatever order they ask."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import permutations

import numpy as np
import pytest

from sordino.algorithms import ScheduledPull
from sordino.algorithms.scheduled_pull.manager import Manager
from sordino.runtime.exchange.actions import Tell
from sordino.simulate.job import Job
from sordino.simulate.links import Links
from sordino.simulate.pulling import Pulling

BOUND = 2.0
"""Limit of chi-square divided by its degrees of freedom. For independent draws, this quotient has mean 1, and with 48
degrees (8 workers) one fair run in 20000 would exceed the limit. Here it is lower, because workers that pull at the
same time have different peers. Seeds are fixed."""


def unfairness(counts: np.ndarray) -> float:
    """Return chi-square divided by its degrees of freedom. Worker i has pulled counts[i, j] times from worker j."""
    size = len(counts)
    apart = ~np.eye(size, dtype=bool)
    expected = np.broadcast_to(counts.sum(1, keepdims=True) / (size - 1), counts.shape)
    assert (counts.diagonal() == 0).all() and (expected > 5).all()
    return float((((counts - expected) ** 2 / expected)[apart]).sum()) / (size * (size - 2))


def orders(size: int, kind: str) -> Iterator[list[int]]:
    """Yield the order in which workers ask in each window."""
    draws = np.random.default_rng(1)
    while True:
        yield list(range(size)) if kind == "by rank" else draws.permutation(size).tolist()


@pytest.mark.parametrize("kind", ("by rank", "by rank, two at a time", "random"))
@pytest.mark.parametrize("size", (5, 8, 20))
def test_all_ask_before_anyone_is_done(size: int, kind: str) -> None:
    windows = 4000 if size < 20 else 1500
    manager = Manager(size, 5, 0.1)
    counts = np.zeros((size, size))
    together = 2 if kind.endswith("two at a time") else size
    for _, order in zip(range(windows), orders(size, kind.partition(",")[0])):
        for begin in range(0, size, together):
            peers: dict[int, int] = {}
            for worker in order[begin : begin + together]:
                (grant,) = manager.on_message(0.0, worker, ("ask", 1, 9.0))
                assert isinstance(grant, Tell) and grant.message[0] == "grant"
                peers[worker] = int(grant.message[2])
            assert len(set(peers.values())) == len(peers)
            for worker, peer in peers.items():
                counts[worker, peer] += 1
                assert manager.on_message(0.0, worker, ("done", peer, 1.0)) == []
    assert unfairness(counts) < BOUND


def test_every_way_in_which_nobody_has_itself_is_as_likely() -> None:
    manager = Manager(4, 2, 0.1)
    ways = {way: 0 for way in permutations(range(4)) if all(way[i] != i for i in range(4))}
    for _ in range(4500):
        found = []
        for worker in range(4):
            grant = manager.get_start_time(worker, 9.0)
            assert grant is not None
            found.append(grant[0])
        ways[tuple(found)] += 1
        for worker, peer in enumerate(found):
            manager.update_information(worker, peer, None)
    # There are nine ways. Each is expected 500 times, with a standard deviation of 21.
    assert len(ways) == 9 and all(abs(count - 500) < 4 * math.sqrt(500 * 8 / 9) for count in ways.values())


@pytest.mark.parametrize(
    ("compute", "gbps", "latency"),
    [
        pytest.param([0.01] * 8, [10.0] * 8, 1e-3, id="equal"),
        pytest.param([0.01] * 8, [1.0] * 8, 1e-5, id="equal, a pull takes four fifths of a window"),
        pytest.param([0.01, 0.01, 0.012, 0.015, 0.02, 0.01, 0.013, 0.011], [10.0] * 8, 1e-5, id="some compute longer"),
        pytest.param([0.05] * 8, [10.0, 10, 1, 1, 5, 5, 2, 2], 1e-3, id="some have slower links"),
    ],
)
def test_workers_of_a_simulation(compute: list[float], gbps: list[float], latency: float) -> None:
    algorithm = ScheduledPull(interval=1, schedule="manager", seed=3)
    job = Job(algorithm, 8, Links(gbps, latency), np.array(compute), 1e6, steps=400, data="none")
    world = Pulling(job, lambda part: None)
    counts = np.zeros((8, 8))
    received = world.record.received

    def count(worker: int, peer: int, begin: float, end: float) -> None:
        counts[worker, peer] += 1
        received(worker, peer, begin, end)

    world.record.received = count  # type: ignore[method-assign]
    world.run()
    assert counts.sum() >= 8 * 399 and unfairness(counts) < BOUND
