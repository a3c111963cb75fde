"""The lock-step algorithms on all workers of the data-free problem at once: arrays instead of messages.

A class an algorithm, each with one method, `step`. What it does is what the real optimizer does to the same parameters,
to rounding. Time and traffic are not its business.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

import numpy as np

from sordino.algorithms import Algorithm
from sordino.algorithms.allreduce import AllReduce
from sordino.algorithms.base import load
from sordino.algorithms.caps import ParameterSkipping
from sordino.algorithms.elastic_averaging import ElasticAveraging
from sordino.algorithms.gossip import MixingGossip
from sordino.algorithms.layered import Layered
from sordino.algorithms.local_sgd import LocalSGD
from sordino.algorithms.push_sum import PushSum as PushSumAlgorithm
from sordino.runtime.segments import segment_numbers
from sordino.simulate.phases import Booleans
from sordino.simulate.quadratic import Floats, Quadratic
from sordino.simulate.traffic import Rows, SharedRows


class Numerics(Protocol):
    """What the steps of an algorithm do to everybody's parameters."""

    def step(self, number: int) -> Booleans | None:
        """Take everybody's step, numbered from 0. Return, of parameter skipping, which items were sent."""


def numerics_of(algorithm: Algorithm, problem: Quadratic, rows: SharedRows | None = None) -> Numerics:
    """Return the numerics of an algorithm whose options have been checked, and that says where they are.

    Args:
        algorithm: with its settings.
        problem: of all workers, which the numerics change.
        rows: of exchanges, which its traffic may have found already.
    """
    if problem.workers == 1:
        return _Alone(problem)
    assert algorithm.simulation.arrays is not None
    numerics: Numerics = load(algorithm.simulation.arrays)(algorithm, problem, rows or SharedRows())
    return numerics


def _mean(values: Floats) -> Floats:
    """Return the mean over the first axis."""
    return np.asarray(values.mean(axis=0, dtype=np.float64).astype(np.float32))


def _mean_in_groups(values: Floats, members: int) -> Floats:
    """Return everybody's mean over its group of neighbours, [workers, size]."""
    groups = values.reshape(-1, members, values.shape[1])
    return np.repeat(groups.mean(axis=1, dtype=np.float64).astype(np.float32), members, axis=0)


class _Alone:
    """One worker has nobody to communicate with."""

    def __init__(self, problem: Quadratic) -> None:
        self._problem = problem

    def step(self, number: int) -> Booleans | None:
        self._problem.move(self._problem.gradients())
        return None


class Synchronous:
    """Everybody moves by the mean of all gradients, or by that of the step before where it is late."""

    def __init__(self, algorithm: AllReduce | Layered, problem: Quadratic, rows: SharedRows) -> None:
        self._problem, self._late = problem, algorithm.traits.late
        self._before: Floats | None = None

    def step(self, number: int) -> Booleans | None:
        mean = _mean(self._problem.gradients())
        used = self._before if self._late else mean
        if used is not None:
            self._problem.move(used)
        self._before = mean
        return None


class Local:
    """Groups move by their own gradients; now and then their models are averaged."""

    def __init__(self, algorithm: LocalSGD, problem: Quadratic, rows: SharedRows) -> None:
        self._problem, self._members = problem, algorithm.group_size
        self._models = algorithm.groups_of(problem.workers)
        self._since = algorithm.start if isinstance(algorithm.start, int) else 0
        self._interval, self._adds_up = algorithm.interval, algorithm.aggregate == "gradients"
        self._then: Floats | None = None  # everybody's parameters when they were last averaged

    def step(self, number: int) -> Booleans | None:
        problem, alone = self._problem, number >= self._since
        if alone and self._adds_up and self._then is None:
            self._then = problem.parameters.copy()
        gradients = problem.gradients()
        problem.move(_mean_in_groups(gradients, self._members) if alone else _mean(gradients))
        if alone and (number + 1 - self._since) % self._interval == 0 and self._models > 1:
            self._average(problem.parameters)
        return None

    def _average(self, values: Floats) -> None:
        by_place = values.reshape(self._models, self._members, values.shape[1])
        if self._then is None:
            by_place[:] = _mean(by_place)
            return
        moved = (values - self._then).reshape(by_place.shape)
        values[:] = self._then + np.tile(moved.sum(axis=0, dtype=np.float64).astype(np.float32), (self._models, 1))
        self._then[:] = values


class Elastic:
    """Everybody is drawn towards a centre, and it towards their mean."""

    def __init__(self, algorithm: ElasticAveraging, problem: Quadratic, rows: SharedRows) -> None:
        self._problem, self._interval = problem, algorithm.interval
        self._rate = algorithm.moving_rate
        self._centre = _mean(problem.parameters)

    def step(self, number: int) -> Booleans | None:
        problem = self._problem
        problem.move(problem.gradients())
        if (number + 1) % self._interval == 0:
            values = problem.parameters
            mean = _mean(values)
            values += np.float32(self._rate / problem.workers) * (self._centre - values)
            self._centre += np.float32(self._rate) * (mean - self._centre)
        return None


class Skipping:
    """Everybody moves by its own gradient; then items that have changed are averaged. The naive detector."""

    def __init__(self, algorithm: ParameterSkipping, problem: Quadratic, rows: SharedRows) -> None:
        self._algorithm, self._problem = algorithm, problem
        items = [int(size) // 4 for size in algorithm.items_of([4 * count for _, count in problem.tensors])]
        self._item_of = np.repeat(np.arange(len(items)), items)
        self._begins = np.cumsum([0, *items[:-1]])
        self._items = np.array(items)
        self._skipped = np.zeros(len(items), np.int64)  # steps in a row without each

    def step(self, number: int) -> Booleans | None:
        problem, algorithm = self._problem, self._algorithm
        before = problem.parameters.copy()
        problem.move(problem.gradients())
        counts = np.add.reduceat(self._unchanged(before), self._begins, axis=1, dtype=np.int64)
        still = (counts * 100.0 >= algorithm.threshold * self._items).all(axis=0)
        skipped = still & (self._skipped < algorithm.probe_interval)
        self._skipped = np.where(skipped, self._skipped + 1, 0)
        sent = ~skipped[self._item_of]
        problem.parameters[:, sent] = _mean(problem.parameters[:, sent])
        return np.asarray(~skipped)

    def _unchanged(self, before: Floats) -> Booleans:
        now, digits = self._problem.parameters, self._algorithm.digits
        same = np.asarray(now.view(np.int32) == before.view(np.int32))
        if digits is None:
            return same
        return np.asarray(same | (_rounded(now, digits) == _rounded(before, digits)))


def _rounded(values: Floats, digits: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return np.asarray(np.rint(values.astype(np.float64) * 10.0**digits))


class Mixing:
    """Everybody moves by its own gradient (or its group's), then takes averages of others' parameters and its own."""

    def __init__(self, algorithm: MixingGossip, problem: Quadratic, rows: SharedRows) -> None:
        self._problem = problem
        self._interval, self._members = algorithm.interval, algorithm.workers_in_group
        names, counts = zip(*problem.tensors)
        scale = problem.message_bytes / problem.parameter_bytes  # segments are cut by the bytes that links see
        numbers = segment_numbers(names, [4 * count * scale for count in counts], algorithm.segments)
        segment_of = np.repeat(numbers, counts)
        self._columns = [np.flatnonzero(segment_of == number) for number in range(max(numbers) + 1)]
        self._topologies, self._rows = algorithm.rounds_of(problem.workers, len(self._columns)), rows

    def rows(self, round: int) -> list[list[Rows]]:
        """Return what everybody mixes in an exchange: for each of its topologies, for each segment."""
        segments = range(len(self._columns))
        topologies = enumerate(self._topologies)
        return [[self._rows.of(number, one, round, segment) for segment in segments] for number, one in topologies]

    def step(self, number: int) -> Booleans | None:
        gradients = self._problem.gradients()
        self._problem.move(_mean_in_groups(gradients, self._members) if self._members > 1 else gradients)
        exchanges, rest = divmod(number + 1, self._interval)
        if rest == 0:
            self._exchange(exchanges - 1)
        return None

    def _exchange(self, round: int) -> None:
        values = self._problem.parameters
        for of_topology in self.rows(round):
            for columns, rows in zip(self._columns, of_topology):
                values[:, columns] = mixed(rows, values[:, columns])


def mixed(rows: Rows, values: np.ndarray, others_only: bool = False) -> np.ndarray:  # type: ignore[type-arg]
    """Return what everybody has after a mixing of `values`, [workers, elements].

    Args:
        rows: what each worker mixes.
        values: of each worker, [workers, elements]; left as they are.
        others_only: without one's own share.
    """
    found = values * rows.keeps_own[:, None] if not others_only else np.zeros_like(values)
    for workers, sources in rows.slots():
        found[workers] += values[sources]
    found *= rows.scale.astype(values.dtype)[:, None]
    return found


class PushSum(Mixing):
    """Push-sum: numerators and weights are mixed alike; with overlap what others send is added some exchanges later."""

    def __init__(self, algorithm: PushSumAlgorithm, problem: Quadratic, rows: SharedRows) -> None:
        super().__init__(algorithm, problem, rows)
        self._overlap = algorithm.overlap
        self._weights = np.ones((problem.workers, len(self._columns)))
        self._before = problem.parameters.copy()  # after the last exchange
        self._under_way: deque[tuple[Floats, np.ndarray[tuple[int, ...], np.dtype[np.float64]]]] = deque()

    def _exchange(self, round: int) -> None:
        values, weights = self._problem.parameters, self._weights
        for number, columns in enumerate(self._columns):
            extra = (weights[:, [number]] - 1).astype(np.float32)
            values[:, columns] += extra * self._before[:, columns]
        if self._overlap == 0:
            for number, (columns, rows) in enumerate(zip(self._columns, self.rows(round)[0])):
                values[:, columns] = mixed(rows, values[:, columns])
                weights[:, [number]] = mixed(rows, weights[:, [number]])
        else:
            if len(self._under_way) == self._overlap:
                come, their_weights = self._under_way.popleft()
                values += come
                weights += their_weights
            self._send(round)
        for number, columns in enumerate(self._columns):
            values[:, columns] /= weights[:, [number]].astype(np.float32)
        self._before[:] = values

    def _send(self, round: int) -> None:
        values, weights = self._problem.parameters, self._weights
        parcel, their_weights = np.empty_like(values), np.empty_like(weights)
        for number, (columns, rows) in enumerate(zip(self._columns, self.rows(round)[0])):
            parcel[:, columns] = mixed(rows, values[:, columns], others_only=True)
            their_weights[:, [number]] = mixed(rows, weights[:, [number]], others_only=True)
            scale = rows.scale[:, None]
            values[:, columns] *= scale.astype(np.float32)
            weights[:, [number]] *= scale
        self._under_way.append((parcel, their_weights))
