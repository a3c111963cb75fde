"""Who sends how much to whom in the steps of an algorithm.

What is counted are payloads: parameters and gradients, the weights of push-sum, and the bits that say what is skipped.
The flags beside gradients, and padding, are not; and small all-reduces that happen to be ready together, which the core
makes one, are apart here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from sordino._core import Dissemination, Exponential, RandomCycle, RandomPull, Ring, Roulette, Topology
from sordino.algorithms import (
    AllReduce,
    ElasticAveraging,
    Layered,
    LocalSGD,
    MixingAlgorithm,
    ParameterSkipping,
    PushSum,
)
from sordino.algorithms.skipping import piece_bytes, place_by_size
from sordino.simulate.phases import Booleans, Floats, Integers, Phase, Sends, all_reduce, groups_of, ring
from sordino.torch.parameters import segment_numbers

InStep = AllReduce | ElasticAveraging | Layered | LocalSGD | MixingAlgorithm | ParameterSkipping
"""The algorithms whose workers all take the same steps."""

_AVERAGES = (Dissemination, Exponential, RandomCycle, RandomPull, Ring, Roulette)  # own value and all sources', evenly
_WEIGHT = 8  # bytes of a weight of push-sum


class Rows(NamedTuple):
    """What everybody mixes in one segment: own value, if kept, plus the sources', times the scale.

    Attributes:
        sources: of worker 0, then of worker 1, ...
        counts: how many each has, [workers].
        keeps_own, scale: [workers].
    """

    sources: Integers
    counts: Integers
    keeps_own: Booleans
    scale: Floats

    @classmethod
    def of(cls, topology: Topology, round: int, segment: int) -> Rows:
        """All rows of a topology."""
        if isinstance(topology, _AVERAGES):  # the rows follow from the sources: one call instead of one a worker
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
        """Workers, and a source of each: first everybody's first source, then everybody's second one, ..."""
        begins = np.cumsum(self.counts) - self.counts
        found = []
        for slot in range(int(self.counts.max(initial=0))):
            workers = np.flatnonzero(self.counts > slot)
            found.append((workers, self.sources[begins[workers] + slot]))
        return found


# ---- algorithms ------------------------------------------------------------------------------------------------------


class Model(NamedTuple):
    """What is sent.

    Attributes:
        names: of the tensors.
        elements: of each; float32.
        scale: the bytes that links see, over those that there are.
    """

    names: list[str]
    elements: list[int]
    scale: float

    @property
    def sizes(self) -> list[float]:
        """Bytes of each tensor, as links see them."""
        return [4 * count * self.scale for count in self.elements]

    def segments(self, segments: str | int | Sequence[str]) -> list[int]:
        """The segment of each tensor."""
        return segment_numbers(self.names, self.sizes, segments)  # type: ignore[arg-type]

    def segment_sizes(self, segments: str | int | Sequence[str]) -> list[float]:
        """Bytes of each segment."""
        return list(np.bincount(self.segments(segments), weights=self.sizes))

    def gradient_sizes(self, segment_bytes: int) -> list[float]:
        """Bytes of each segment of gradients, which come in the order in which backward computes them."""
        sizes = self.sizes[::-1]
        numbers = segment_numbers(self.names[::-1], sizes, segment_bytes)  # type: ignore[arg-type]
        return list(np.bincount(numbers, weights=sizes))

    def items(self, algorithm: ParameterSkipping) -> list[int]:
        """The elements of what parameter skipping decides about: tensors, or blocks of them."""
        if algorithm.granularity == "tensor":
            return self.elements
        most = algorithm.block_bytes // 4
        return [min(most, count - begin) for count in self.elements for begin in range(0, count, most)]


class Mixing:
    """The exchanges of a mixing algorithm.

    Attributes:
        segments: the segment of each tensor.
    """

    def __init__(self, algorithm: MixingAlgorithm, workers: int, model: Model) -> None:
        self.segments = model.segments(algorithm.segments)
        self.bytes = model.segment_sizes(algorithm.segments)
        if isinstance(algorithm, PushSum):
            self.bytes = [count + _WEIGHT for count in self.bytes]
        self._topologies = algorithm.rounds_of(workers, len(self.bytes))
        self._last: tuple[int, list[list[Rows]]] = (-1, [])

    def rows(self, round: int) -> list[list[Rows]]:
        """What everybody mixes in an exchange: for each of its topologies, for each segment."""
        if self._last[0] != round:
            numbers = range(len(self.bytes))
            self._last = (round, [[Rows.of(topology, round, n) for n in numbers] for topology in self._topologies])
        return self._last[1]

    def phases(self, round: int) -> list[Phase]:
        """What is sent in an exchange."""
        phases: list[Phase] = []
        for of_topology in self.rows(round):
            slots = [(slot, count) for rows, count in zip(of_topology, self.bytes) for slot in rows.slots()]
            if slots:
                targets, sources = (np.concatenate([slot[end] for slot, _ in slots]) for end in (0, 1))
                sizes = np.repeat([count for _, count in slots], [len(slot[0]) for slot, _ in slots])
                phases.append(Sends(sources, targets, sizes, models=True))
        return phases


class Traffic(NamedTuple):
    """What an algorithm sends.

    Attributes:
        phases: of a step, numbered from 0. Of parameter skipping they depend on what is sent, bool [items].
        delay: how many exchanges later it is that a worker waits for one.
        behind_loading: whether what follows a step is waited for after the next batch has been loaded.
        mixing: of a mixing algorithm.
    """

    phases: Callable[[int, Booleans | None], list[Phase]]
    delay: int = 0
    behind_loading: bool = False
    mixing: Mixing | None = None


def traffic_of(algorithm: InStep, workers: int, model: Model) -> Traffic:
    """What `workers` workers, each with a link of its own, send.

    Raises:
        UsageError: the algorithm cannot serve so many workers.
    """
    everybody, count = groups_of(workers, workers), sum(model.sizes)
    if workers == 1:
        return Traffic(lambda step, sent: [])
    if isinstance(algorithm, AllReduce):
        reduction = _gradients(everybody, model, algorithm.segment_bytes)
        return Traffic(lambda step, sent: reduction, delay=int(algorithm.double_buffering))
    if isinstance(algorithm, Layered):
        layers = _layered(algorithm, workers, model)
        return Traffic(lambda step, sent: layers, behind_loading=True)
    if isinstance(algorithm, LocalSGD):
        return Traffic(_local_sgd(algorithm, workers, model))
    if isinstance(algorithm, ParameterSkipping):
        return Traffic(_skipping(algorithm, workers, model))
    if isinstance(algorithm, ElasticAveraging):
        average, every = all_reduce(everybody, count), algorithm.interval
        # Before the first step, the mean of all parameters becomes the centre.
        return Traffic(lambda step, sent: average * ((step == 0) + ((step + 1) % every == 0)))
    return _mixing(algorithm, workers, model)


def _gradients(sets: Integers, model: Model, segment_bytes: int) -> list[Phase]:
    return [phase for size in model.gradient_sizes(segment_bytes) for phase in all_reduce(sets, size)]


def _layered(algorithm: Layered, workers: int, model: Model) -> list[Phase]:
    roles = algorithm.roles(range(workers))
    groups, communicators = np.array(roles.groups), np.array([roles.communicators])
    owners = np.repeat(communicators[0], groups.shape[1] - 1)
    others = groups[groups != communicators.T]
    phases: list[Phase] = []
    for count in model.gradient_sizes(algorithm.segment_bytes):
        inward, outward = Sends(others, owners, count), Sends(owners, others, count)
        among = ring(communicators, count / len(groups), 2 * (len(groups) - 1))
        phases += [phase for phase in (inward, among, outward) if len(phase.sources) > 0]
    return phases


def _local_sgd(algorithm: LocalSGD, workers: int, model: Model) -> Callable[[int, Booleans | None], list[Phase]]:
    members, count = algorithm.group_size, sum(model.sizes)
    models = algorithm.groups_of(workers)
    groups = groups_of(workers, members)
    between = all_reduce(groups.T, count / members if algorithm.sharded else count) if models > 1 else []
    calendar = Calendar.of(algorithm)
    if algorithm.sharded:
        sizes = model.gradient_sizes(algorithm.segment_bytes)
        shards: list[Phase] = [ring(groups, size / members, members - 1) for size in sizes]

        def sharded(step: int, sent: Booleans | None) -> list[Phase]:
            across = calendar.averages(step) or not calendar.alone(step)
            return [*shards, *(between if across else []), *shards]

        return sharded
    within = _gradients(groups, model, algorithm.segment_bytes)
    together = _gradients(groups_of(workers, workers), model, algorithm.segment_bytes)
    return lambda step, sent: [
        *(within if calendar.alone(step) else together),
        *(between if calendar.averages(step) else []),
    ]


class Calendar(NamedTuple):
    """When groups of local SGD are on their own, and when their models are averaged."""

    start: int
    interval: int

    @classmethod
    def of(cls, algorithm: LocalSGD) -> Calendar:
        """Of an algorithm whose steps are known beforehand."""
        return cls(algorithm.start if isinstance(algorithm.start, int) else 0, algorithm.interval)

    def alone(self, step: int) -> bool:
        """Whether gradients of a step, numbered from 0, are averaged in groups alone."""
        return step >= self.start

    def averages(self, step: int) -> bool:
        """Whether models are averaged after a step."""
        return self.alone(step) and (step + 1 - self.start) % self.interval == 0


def _skipping(
    algorithm: ParameterSkipping, workers: int, model: Model
) -> Callable[[int, Booleans | None], list[Phase]]:
    everybody = groups_of(workers, workers)
    sizes = np.array(model.items(algorithm)) * 4 * model.scale
    mask = all_reduce(everybody, len(sizes))
    if algorithm.exchange == "allreduce":
        return lambda step, sent: [*mask, *all_reduce(everybody, float(sizes[sent].sum()))]
    servers = np.array(algorithm.serving_ranks(workers))
    limit = piece_bytes(math.ceil(sizes.sum()), len(servers))

    def serve(sent: Booleans) -> list[Phase]:
        pieces = [min(limit, size - begin) for size in sizes[sent] for begin in np.arange(0, size, limit)]
        placed = place_by_size(pieces, len(servers))  # type: ignore[arg-type]
        loads = np.bincount(placed, weights=pieces, minlength=len(servers)) if pieces else np.zeros(len(servers))
        # In turn, so that not all send to the same server first.
        shifts = np.arange(workers)
        targets = np.concatenate([servers[(shifts + turn) % len(servers)] for turn in range(len(servers))])
        counts = np.concatenate([loads[(shifts + turn) % len(servers)] for turn in range(len(servers))])
        others = np.tile(shifts, len(servers))
        real = (targets != others) & (counts > 0)
        targets, others, counts = targets[real], others[real], counts[real]
        return [Sends(others, targets, counts), Sends(targets, others, counts)] if len(targets) else []

    return lambda step, sent: [*mask, *serve(np.ones(len(sizes), np.bool_) if sent is None else sent)]


def _mixing(algorithm: MixingAlgorithm, workers: int, model: Model) -> Traffic:
    mixing = Mixing(algorithm, workers, model)
    groups = groups_of(workers, algorithm.workers_in_group)
    segment_bytes = getattr(algorithm, "segment_bytes", AllReduce().segment_bytes)
    within = _gradients(groups, model, segment_bytes)

    def phases(step: int, sent: Booleans | None) -> list[Phase]:
        exchanges, rest = divmod(step + 1, algorithm.interval)
        return [*within, *(mixing.phases(exchanges - 1) if rest == 0 else [])]

    return Traffic(phases, delay=algorithm.overlap if isinstance(algorithm, PushSum) else 0, mixing=mixing)
