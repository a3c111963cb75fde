"""Algorithms of workers that step together, as arrays over all workers of the problem without data.

There is one class per algorithm, each with one method, `step`. It changes the parameters as the real optimizer does, up
to rounding. It does not deal with time and traffic.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

import numpy as np

from sordino.algorithms import Algorithm
from sordino.algorithms.allreduce import AllReduce
from sordino.algorithms.base import load
from sordino.algorithms.caps import CaPS
from sordino.algorithms.diloco import DiLoCo, fragment_of
from sordino.algorithms.elastic_averaging import ElasticAveraging
from sordino.algorithms.gossip import MixingGossip
from sordino.algorithms.layered import Layered
from sordino.algorithms.local_sgd import LocalSGD
from sordino.algorithms.noloco import NoLoCo
from sordino.algorithms.push_sum import PushSum as PushSumAlgorithm
from sordino.runtime.exchange.segments import segment_numbers
from sordino.simulate.phases import Booleans
from sordino.simulate.quadratic import Floats, Quadratic
from sordino.simulate.traffic import Rows, SharedRows


class Numerics(Protocol):
    """Effect of the steps of an algorithm on the parameters of all workers."""

    def step(self, number: int) -> Booleans | None:
        """Take step `number`, from 0, of all workers. Return flags of the items sent (parameter skipping), or None."""


def numerics_of(algorithm: Algorithm, problem: Quadratic, rows: SharedRows | None = None) -> Numerics:
    """Return the numerics of an algorithm that names its arrays (`Simulation.arrays`), with checked settings.

    Args:
        algorithm: the algorithm with its settings.
        problem: the problem with all workers. The numerics change it.
        rows: rows of exchanges, shared with the traffic; None: new ones.
    """
    if problem.workers == 1:
        return _Alone(problem)
    name = algorithm.simulation.arrays
    assert name is not None
    numerics: Numerics = (NUMERICS.get(name) or load(name))(algorithm, problem, rows or SharedRows())
    return numerics


def _mean(values: Floats) -> Floats:
    """Return the mean over the first axis."""
    return np.asarray(values.mean(axis=0, dtype=np.float64).astype(np.float32))


def _mean_in_groups(values: Floats, members: int) -> Floats:
    """Return for every worker the mean over its group of neighbors, [workers, size]."""
    groups = values.reshape(-1, members, values.shape[1])
    return np.repeat(groups.mean(axis=1, dtype=np.float64).astype(np.float32), members, axis=0)


class _Alone:
    """One worker, which does not communicate."""

    def __init__(self, problem: Quadratic) -> None:
        self._problem = problem

    def step(self, number: int) -> Booleans | None:
        self._problem.move(self._problem.gradients())
        return None


class Synchronous:
    """All workers move by the mean of all gradients, or of the previous step's gradients if the algorithm is late."""

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
    """Groups move by their own gradients. Their models are averaged at intervals."""

    def __init__(self, algorithm: LocalSGD, problem: Quadratic, rows: SharedRows) -> None:
        self._problem, self._members = problem, algorithm.group_size
        self._models = algorithm.groups_of(problem.workers)
        self._since = algorithm.start if isinstance(algorithm.start, int) else 0
        self._interval, self._adds_up = algorithm.interval, algorithm.aggregate == "gradients"
        self._then: Floats | None = None  # parameters of all workers after the last averaging

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
    """Every worker is drawn towards a center, and the center towards the mean of the workers."""

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


class Outer:
    """Workers or groups move alone. After each exchange a fragment of their shared model takes an outer step."""

    def __init__(self, algorithm: DiLoCo, problem: Quadratic, rows: SharedRows) -> None:
        self._algorithm, self._problem = algorithm, problem
        names, counts = zip(*problem.tensors)
        scale = problem.message_bytes / problem.parameter_bytes
        segments = segment_numbers(names, [4 * count * scale for count in counts], algorithm.cut)
        algorithm.check_fragments(max(segments) + 1)
        self._fragment = np.repeat([fragment_of(one, algorithm.fragments) for one in segments], counts)
        self._outer = problem.parameters[0].copy()
        self._momentum = np.zeros_like(self._outer)
        self._pending: tuple[Booleans, Floats] | None = None  # elements of the fragment in flight, their mean change

    def step(self, number: int) -> Booleans | None:
        algorithm, problem = self._algorithm, self._problem
        gradients = problem.gradients()
        members = algorithm.group_size
        problem.move(_mean_in_groups(gradients, members) if members > 1 else gradients)
        exchanges, rest = divmod(number + 1, algorithm.every)
        if rest == 0:
            here = self._fragment == (exchanges - 1) % algorithm.fragments
            self._pending = here, _mean(problem.parameters[:, here]) - self._outer[here]
        if rest == algorithm.overlap and self._pending is not None:
            self._outer_step(*self._pending)
            self._pending = None
        return None

    def _outer_step(self, here: Booleans, change: Floats) -> None:
        algorithm, parameters = self._algorithm, self._problem.parameters
        momentum = np.float32(algorithm.momentum) * self._momentum[here] + change
        step = change + np.float32(algorithm.momentum) * momentum if algorithm.nesterov else momentum
        self._momentum[here] = momentum
        self._outer[here] += np.float32(algorithm.rate) * step
        own = np.float32(algorithm.own_share)
        parameters[:, here] = self._outer[here] + own * (parameters[:, here] - self._outer[here])


class Skipping:
    """Each worker moves by its own gradient, then items that have changed are averaged. This is the naive detector."""

    def __init__(self, algorithm: CaPS, problem: Quadratic, rows: SharedRows) -> None:
        self._algorithm, self._problem = algorithm, problem
        items = [int(size) // 4 for size in algorithm.items_of([4 * count for _, count in problem.tensors])]
        self._item_of = np.repeat(np.arange(len(items)), items)
        self._begins = np.cumsum([0, *items[:-1]])
        self._items = np.array(items)
        self._skipped = np.zeros(len(items), np.int64)  # by item: consecutive steps in which it was skipped

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
    """Each worker moves by its own (or its group's) gradient, then averages its parameters with its sources'."""

    def __init__(self, algorithm: MixingGossip, problem: Quadratic, rows: SharedRows) -> None:
        self._problem = problem
        self._interval, self._members = algorithm.interval, algorithm.workers_in_group
        names, counts = zip(*problem.tensors)
        scale = problem.message_bytes / problem.parameter_bytes  # segments are cut by the bytes on the links
        numbers = segment_numbers(names, [4 * count * scale for count in counts], algorithm.segments)
        segment_of = np.repeat(numbers, counts)
        self._columns = [np.flatnonzero(segment_of == number) for number in range(max(numbers) + 1)]
        self._topologies, self._rows = algorithm.rounds_of(problem.workers, len(self._columns)), rows

    def rows(self, round: int) -> list[list[Rows]]:
        """Return the rows of an exchange, for each of its topologies and each segment."""
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
    """Return the values of all workers after a mixing, [workers, elements].

    Args:
        rows: rows of the mixing.
        values: values of the workers, [workers, elements]. They are not changed.
        others_only: whether to leave out each worker's own value.
    """
    found = values * rows.keeps_own[:, None] if not others_only else np.zeros_like(values)
    for workers, sources in rows.slots():
        found[workers] += values[sources]
    found *= rows.scale.astype(values.dtype)[:, None]
    return found


class OuterGossip(Mixing):
    """Workers or groups move alone. Then each takes an outer step with the mean of its random group."""

    def __init__(self, algorithm: NoLoCo, problem: Quadratic, rows: SharedRows) -> None:
        super().__init__(algorithm, problem, rows)
        self._algorithm = algorithm
        self._outer = np.tile(problem.parameters[0], (problem.workers, 1))
        self._momentum = np.zeros_like(self._outer)

    def _exchange(self, round: int) -> None:
        algorithm, values = self._algorithm, self._problem.parameters
        pull = np.float32(algorithm.pull)
        values += (pull - 1) * self._outer
        super()._exchange(round)
        self._momentum *= np.float32(algorithm.outer_momentum)
        self._momentum += np.float32(algorithm.outer_lr) * (values - pull * self._outer)
        self._outer += self._momentum
        values[:] = self._outer


class PushSum(Mixing):
    """Push-sum: numerators and weights are mixed in the same way. With overlap, incoming parts are added later."""

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


NUMERICS = {
    "synchronous": Synchronous,
    "local": Local,
    "elastic": Elastic,
    "outer": Outer,
    "caps": Skipping,
    "mixing": Mixing,
    "outer-gossip": OuterGossip,
    "push-sum": PushSum,
}
"""Classes by their names in `Simulation.arrays`."""
