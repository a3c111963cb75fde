"""Conversion of an algorithm's traffic (`sordino.algorithms.traffic`) to messages between workers, each with one link.

The core combines small all-reduces that are ready at the same time. Here they are separate.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import numpy as np

from sordino._core import (
    Dissemination,
    Exponential,
    FromOwner,
    RandomCycle,
    RandomGroups,
    RandomPull,
    Ring,
    Roulette,
    ToOwner,
    Topology,
)
from sordino.algorithms import Algorithm
from sordino.algorithms.traffic import Exchange, Model, Operation, Reduction
from sordino.simulate.phases import Booleans, Floats, Integers, Phase, Sends, all_reduce, ring

# Topologies whose rows are the mean of a worker's own value and its sources'.
_AVERAGES = (Dissemination, Exponential, RandomCycle, RandomGroups, RandomPull, Ring, Roulette)


class Rows(NamedTuple):
    """Mixing of all workers in one segment: (own value, if kept, plus the values of the sources) times the scale.

    Attributes:
        sources: sources of worker 0, then of worker 1, ...
        counts: number of sources of each worker, [workers].
        keeps_own, scale: [workers].
    """

    sources: Integers
    counts: Integers
    keeps_own: Booleans
    scale: Floats

    @classmethod
    def of(cls, topology: Topology, round: int, segment: int) -> Rows:
        """Return all rows of a topology."""
        if isinstance(topology, _AVERAGES):  # the rows follow from the sources: one call instead of one per worker
            found = topology.all_sources(round, segment)
            counts = np.fromiter(map(len, found), np.int64, len(found))
            keeps_own, scale = np.ones(len(found), np.bool_), 1 / (counts + 1)
        else:
            rows = [topology.row(round, segment, worker) for worker in range(topology.size)]
            found = [row[0] for row in rows]
            counts = np.fromiter(map(len, found), np.int64, len(found))
            keeps_own, scale = np.array([row[1] for row in rows]), np.array([row[2] for row in rows])
        sources = np.fromiter(chain.from_iterable(found), np.int64, int(counts.sum()))
        return cls(sources, counts, keeps_own, scale)

    def slots(self) -> list[tuple[Integers, Integers]]:
        """Return workers and one source of each: first the first source of every worker, then the second one, ..."""
        begins = np.cumsum(self.counts) - self.counts
        found = []
        for slot in range(int(self.counts.max(initial=0))):
            workers = np.flatnonzero(self.counts > slot)
            found.append((workers, self.sources[begins[workers] + slot]))
        return found


class SharedRows:
    """Rows of the current round.

    The numerics and the count of messages share them, because computing them takes longer than either.
    """

    def __init__(self) -> None:
        self._round = -1
        self._found: dict[tuple[int, int], Rows] = {}

    def of(self, number: int, topology: Topology, round: int, segment: int) -> Rows:
        """Return the rows of a segment in a round.

        Args:
            number: number of the exchange among the exchanges of a phase.
            topology: the topology; always the same for a number.
            round: round of the topology.
            segment: the segment that is mixed.
        """
        if round != self._round:
            self._round, self._found = round, {}
        if (number, segment) not in self._found:
            self._found[number, segment] = Rows.of(topology, round, segment)
        return self._found[number, segment]


class StepMessages:
    """Messages that an algorithm sends in the steps of its workers.

    Attributes:
        delay: number of exchanges after which a worker waits for an exchange that it has started.
        period: steps in which every phase runs at least once.
        settled: first step at which all phases have begun.
        rows: rows of exchanges that differ from round to round.

    Raises:
        UsageError: the algorithm does not work with this number of workers.
    """

    def __init__(self, algorithm: Algorithm, workers: int, model: Model) -> None:
        traffic = algorithm.traffic(model, range(workers)) if workers > 1 else None
        self._phases = [] if traffic is None else list(traffic.phases)
        self.delay = 0 if traffic is None else traffic.delay
        self.period = max((phase.every for phase in self._phases), default=1)
        self.settled = max((phase.since for phase in self._phases), default=0)
        self.rows = SharedRows()
        self._shares_rows = sum(phase.varies for phase in self._phases) == 1  # exchange numbers are per phase
        self._messages: dict[int, list[Phase]] = {}  # messages of phases that never vary, by number of the phase

    def phases(self, step: int, sent: Booleans | None) -> list[Phase]:
        """Return the messages of a step.

        Args:
            step: number of the step, from 0.
            sent: flags of the items that parameter skipping sends; bool [items].
        """
        found: list[Phase] = []
        for number, phase in enumerate(self._phases):
            round = phase.round_of(step)
            if round is None:
                continue
            if phase.varies:
                messages = _messages(phase.at(round, sent), self.rows if self._shares_rows else SharedRows())
            else:
                if number not in self._messages:
                    self._messages[number] = _messages(phase.at(round), SharedRows())
                messages = self._messages[number]
            if phase.overlap or phase.loading:
                messages = [replace(one, overlap=phase.overlap, loading=phase.loading) for one in messages]
            found += messages
        return found


def _messages(operations: Sequence[Operation], rows: SharedRows) -> list[Phase]:
    found: list[Phase] = []
    exchanges = itertools.count()
    for operation in operations:
        if isinstance(operation, Reduction):
            found += [phase for size in operation.buckets for phase in all_reduce(operation.sets, size)]
        elif isinstance(operation, Exchange):
            found += _exchange(next(exchanges), operation, rows)
    return found


def _exchange(number: int, exchange: Exchange, rows: SharedRows) -> list[Phase]:
    if exchange.topology.is_mean_of_all and not exchange.separate:
        return all_reduce(exchange.sets, sum(exchange.segments))
    if not isinstance(exchange.topology, (ToOwner, FromOwner)):
        sends = _mixed(number, exchange, rows)
    elif len(set(exchange.segments)) == 1 and len(exchange.segments) == exchange.sets.shape[1]:
        # All segments have the same size: in every turn each worker sends one part and receives one.
        return [ring(exchange.sets, exchange.segments[0], exchange.sets.shape[1] - 1)] if exchange.segments[0] else []
    else:
        sends = _served(exchange)
    return [sends] if len(sends.sources) > 0 else []


def _mixed(number: int, exchange: Exchange, rows: SharedRows) -> Sends:
    """Return sends: each worker's first source of the first segment, then the second one, and so on.

    If messages are separate, all segments that a worker sends to another one are one message.
    """
    targets, sources, sizes = [], [], []
    for segment, size in enumerate(exchange.segments):
        for to, source in rows.of(number, exchange.topology, exchange.round, segment).slots():
            targets.append(exchange.sets[:, to].ravel())
            sources.append(exchange.sets[:, source].ravel())
            sizes.append(np.full(len(targets[-1]), size))
    sends = _sends(sources, targets, sizes, exchange.models)
    return _by_pairs(sends) if exchange.separate else sends


def _by_pairs(sends: Sends) -> Sends:
    """Return these sends with one message for each pair of sender and receiver, in the order of their first ones."""
    workers = int(sends.targets.max(initial=0)) + 1
    _, first, numbers = np.unique(sends.sources * workers + sends.targets, return_index=True, return_inverse=True)
    order = np.argsort(first)
    every: Floats = np.broadcast_to(sends.bytes, numbers.shape)
    sizes = np.bincount(numbers.ravel(), weights=every)[order].astype(np.float64)
    return replace(sends, sources=sends.sources[first[order]], targets=sends.targets[first[order]], bytes=sizes)


def _served(exchange: Exchange) -> Sends:
    """Return sends in an order in which workers do not all send to the same owner first."""
    places, sizes = np.arange(exchange.topology.size), np.array(exchange.segments)
    owners = np.flatnonzero(sizes > 0)
    ends: tuple[list[Integers], list[Integers]] = ([], [])
    counts = []
    for turn in range(len(owners)):
        served = owners[(places + turn) % len(owners)]
        others = places[served != places]
        served = served[served != places]
        ends[0].append(exchange.sets[:, others].ravel())
        ends[1].append(exchange.sets[:, served].ravel())
        counts.append(np.tile(sizes[served], len(exchange.sets)))
    inward = isinstance(exchange.topology, ToOwner)
    return _sends(ends[1 - inward], ends[inward], counts, exchange.models)


def _sends(sources: list[Integers], targets: list[Integers], sizes: list[Floats], models: bool) -> Sends:
    if not sources:
        return Sends(np.empty(0, np.int64), np.empty(0, np.int64), 0.0)
    return Sends(np.concatenate(sources), np.concatenate(targets), np.concatenate(sizes), models)
