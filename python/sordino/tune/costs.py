"""What a step of an algorithm sends, counted from the very rings and topologies that will move it, and what it costs.

T = s alpha + w beta (Lee et al., equation 3), where w is what goes through the busiest node's link in one direction,
plus the same for what the ranks of a node do in the memory that they share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sordino._core import FromOwner, Mean, RandomCycle, ToOwner, Topology
from sordino.algorithms import (
    ADPSGD,
    Algorithm,
    AllReduce,
    ElasticAveraging,
    GossipAlgorithm,
    Layered,
    LocalSGD,
    ParameterSkipping,
    PushSum,
    ScheduledPull,
)
from sordino.algorithms.gossip import Segments
from sordino.algorithms.skipping import piece_bytes, place_by_size
from sordino.torch.parameters import segment_numbers

BACKWARD = 2 / 3  # of the computation: it costs about twice as much as forward
SMALL = 16 * 1024  # bytes up to which an all-reduce by messages doubles instead of going round a ring
_CACHED = 0.25  # of reading from memory costs what has just been read
_ROUNDS = 8  # of random topologies, to take the mean of


class Line(NamedTuple):
    """One kind of way between ranks: seconds a message, and seconds a byte."""

    alpha: float
    beta: float


@dataclass(frozen=True)
class Rates:
    """What things cost on a machine.

    Attributes:
        inside: in a node's shared memory; its bytes are those that a rank reads and writes. None: it was not measured.
        across: through the link of a node, in one direction while as much goes in the other. None as well.
        agreement: seconds to agree that an operation can start, which exchanges need not.
        hop: seconds from one rank of a ring to the next, apart from the bytes, for ranks of several nodes.
        handling: seconds a gradient, of software: an optimizer has them tensor by tensor.
    """

    inside: Line | None
    across: Line | None
    agreement: float
    hop: float = 0.0
    handling: float = 0.0

    def as_results(self) -> dict[str, object]:
        """For a JSON file."""
        lines = {"inside": self.inside, "across": self.across}
        places = {place: None if line is None else line._asdict() for place, line in lines.items()}
        return {**places, "agreement": self.agreement, "hop": self.hop, "handling": self.handling}

    @classmethod
    def from_results(cls, results: Mapping[str, Any]) -> Rates:
        """What `as_results` made."""
        lines = {place: results[place] and Line(**results[place]) for place in ("inside", "across")}
        return cls(**{**results, **lines})


class Load:
    """What all ranks do at the same time, in one phase of a step.

    Args:
        nodes: the node of each rank, numbered from 0.

    Attributes:
        sent: bytes that each rank sends to other nodes.
        memory: bytes that each rank reads and writes in the memory of its node.
        messages: that go between nodes one after the other, but for those that go round a ring.
        hops: of rings.
        gradients: tensors.
        agreements: operations that are agreed on.
    """

    def __init__(self, nodes: Sequence[int]) -> None:
        self.nodes = nodes
        self.sent = [0.0] * len(nodes)
        self.memory = [0.0] * len(nodes)
        self.messages = 0
        self.hops = 0
        self.gradients = 0
        self.agreements = 0
        self._out = [0.0] * (max(nodes) + 1)
        self._into = list(self._out)

    @property
    def link(self) -> float:
        """Bytes through the busiest link, in one direction."""
        return max(*self._out, *self._into)

    def seconds(self, rates: Rates) -> float:
        """How long it takes."""
        total = self.agreements * rates.agreement + self.gradients * rates.handling
        if rates.across is not None:
            total += self.messages * rates.across.alpha + self.hops * rates.hop + self.link * rates.across.beta
        if rates.inside is not None and max(self.memory) > 0:
            total += rates.inside.alpha * (self.messages + self.hops == 0) + max(self.memory) * rates.inside.beta
        return total

    def send(self, source: int, target: int, count: float) -> None:
        """Counts bytes from one rank to another, by messages."""
        if self.nodes[source] == self.nodes[target]:
            # Into MPI's memory and out of it.
            self.memory[source] += 2 * count
            self.memory[target] += 2 * count
            return
        self.sent[source] += count
        self._out[self.nodes[source]] += count
        self._into[self.nodes[target]] += count

    def all_reduce(self, sets: Sequence[Sequence[int]], count: float, segments: int = 1) -> None:
        """All-reduces of `count` bytes within sets of ranks, at the same time (csrc/collectives/allreduce_*.cc)."""
        if len(sets[0]) == 1:
            return
        self.agreements += segments
        for ranks in sets:
            if len({self.nodes[rank] for rank in ranks}) == 1:
                for rank in ranks:
                    self.memory[rank] += 2 * count  # its shard of all inputs, and of all results
            elif count / segments <= SMALL:
                self._double(ranks, count)
            else:
                for place, rank in enumerate(ranks):
                    self.send(rank, ranks[(place + 1) % len(ranks)], 2 * (len(ranks) - 1) / len(ranks) * count)
        if any(len({self.nodes[rank] for rank in ranks}) > 1 for ranks in sets):
            size = len(sets[0])
            if count / segments <= SMALL:
                self.messages += math.ceil(math.log2(size))
            else:
                self.hops += 2 * (size - 1)

    def _double(self, ranks: Sequence[int], count: float) -> None:
        power = 1 << (len(ranks).bit_length() - 1)
        for place in range(power, len(ranks)):
            self.send(ranks[place], ranks[place - power], count)
            self.send(ranks[place - power], ranks[place], count)
        for place in range(power):
            for bit in range(power.bit_length() - 1):
                self.send(ranks[place], ranks[place ^ 1 << bit], count)

    def exchange(
        self, sets: Sequence[Sequence[int]], topology: Topology, segments: Sequence[float], round: int = 0
    ) -> None:
        """Exchanges within sets of ranks, at the same time (csrc/collectives/exchange.cc).

        Args:
            topology: among the members of a set, by their places.
            segments: the bytes of each.
        """
        before = sum(self.sent)
        for ranks in sets:
            for segment, count in enumerate(segments):
                rows = [topology.row(round, segment, place) for place in range(len(ranks))]
                self._travel(ranks, [sources for sources, _, _ in rows], count)
                self._mix(ranks, rows, count)
        self.messages += sum(self.sent) > before

    def _travel(self, ranks: Sequence[int], sources_of: Sequence[Sequence[int]], count: float) -> None:
        """What a node needs of a rank elsewhere travels once."""
        travels: dict[tuple[int, int], int] = {}
        for rank, sources in zip(ranks, sources_of):
            for source in sources:
                if self.nodes[ranks[source]] != self.nodes[rank]:
                    travels.setdefault((ranks[source], self.nodes[rank]), rank)
        for (source, _), target in travels.items():
            self.send(source, target, count)

    def _mix(self, ranks: Sequence[int], rows: Sequence[tuple[list[int], bool, float]], count: float) -> None:
        """The ranks of a node share the arithmetic: all that is averaged is read once from memory, and again from
        caches; all results are written."""
        for node in {self.nodes[rank] for rank in ranks}:
            here = [place for place, rank in enumerate(ranks) if self.nodes[rank] == node]
            if len(here) == 1:
                continue  # a rank alone mixes what arrives as it arrives: the link's rate has that in it
            averages, writes = set(), 0
            for place in here:
                sources, keeps_own, scale = rows[place]
                if sources or not keeps_own or scale != 1:
                    averages.add(tuple(sorted([*sources, *([place] if keeps_own else [])])))
                    writes += 1
            once = len({source for average in averages for source in average})
            again = sum(map(len, averages)) - once
            for place in here:
                self.memory[ranks[place]] += (once + _CACHED * again + writes) * count / len(here)


class Phase(NamedTuple):
    """A load that comes every `every` steps.

    Attributes:
        hides: what part of it can be hidden at most: backward cannot hide the last segment.
        step: whether the whole next step may hide it, not backward alone.
        loading: whether what lies between two steps hides it, too.
    """

    load: Load
    every: int = 1
    hides: float = 0.0
    step: bool = False
    loading: bool = False


@dataclass(frozen=True)
class Cost:
    """What an algorithm does in a step, apart from computing."""

    phases: tuple[Phase, ...]

    def communication(self, rates: Rates) -> float:
        """Seconds of communication a step, on average."""
        return sum(phase.load.seconds(rates) / phase.every for phase in self.phases)

    def exposed(self, rates: Rates, compute: float, loading: float = 0.0) -> float:
        """Those of them that `compute` seconds of forward and backward, and `loading` seconds between two steps, cannot
        hide."""
        total = 0.0
        for phase in self.phases:
            seconds, room = phase.load.seconds(rates), compute * (1.0 if phase.step else BACKWARD)
            left = seconds - min(seconds * phase.hides, room)
            total += (max(left - loading, 0.0) if phase.loading else left) / phase.every
        return total

    def sent(self) -> list[float]:
        """Bytes a step that each rank sends to other nodes, on average."""
        parts = [[value / phase.every for value in phase.load.sent] for phase in self.phases]
        return [sum(values) for values in zip(*parts)]


def cost_of(algorithm: Algorithm, nodes: Sequence[int], names: Sequence[str], sizes: Sequence[int]) -> Cost:
    """What a step costs.

    Args:
        nodes: the node of each rank, numbered from 0.
        names: of the parameters.
        sizes: their bytes.

    Raises:
        UsageError: the algorithm cannot serve so many ranks.
    """
    everybody = list(range(len(nodes)))
    if isinstance(algorithm, AllReduce):
        phase = _gradients(nodes, [everybody], sizes, algorithm.segment_bytes)
        return Cost((phase._replace(hides=1.0, step=True) if algorithm.double_buffering else phase,))
    if isinstance(algorithm, Layered):
        return _layered(algorithm, nodes, sizes)
    if isinstance(algorithm, LocalSGD):
        return _local_sgd(algorithm, nodes, sizes)
    if isinstance(algorithm, ParameterSkipping):
        return _skipping(algorithm, nodes, sizes)
    if isinstance(algorithm, (ADPSGD, ScheduledPull)):
        return _asynchronous(algorithm, nodes, sizes)
    return _gossip(algorithm, nodes, names, sizes)


def _groups(size: int, members: int) -> list[list[int]]:
    return [list(range(begin, begin + members)) for begin in range(0, size, members)]


def _gradients(nodes: Sequence[int], sets: Sequence[Sequence[int]], sizes: Sequence[int], segment_bytes: int) -> Phase:
    load = Load(nodes)
    count = sum(sizes)
    segments = math.ceil(count / segment_bytes)
    load.gradients = len(sizes)
    load.all_reduce(sets, count, segments)
    return Phase(load, hides=1 - 1 / segments)


def _layered(algorithm: Layered, nodes: Sequence[int], sizes: Sequence[int]) -> Cost:
    roles, count = algorithm.roles(nodes), sum(sizes)
    groups, length = len(roles.groups), len(roles.groups[0])
    workers = length - roles.dedicated
    segments = math.ceil(count / algorithm.segment_bytes)
    whole = [0.0] * roles.place + [count]  # which the communicator owns
    load = Load(nodes)
    load.gradients = len(sizes)
    if groups == 1 and len(set(nodes)) == 1:
        load.exchange(roles.groups, Mean(length, workers), whole)
    else:
        if length > 1:
            load.exchange(roles.groups, ToOwner(length, workers), whole)
            load.exchange(roles.groups, FromOwner(length, workers), whole)
        if groups > 1:
            parts = [count / groups] * groups
            load.exchange([roles.communicators], ToOwner(groups), parts)
            load.exchange([roles.communicators], FromOwner(groups), parts)
    return Cost((Phase(load, hides=1 - 1 / segments, loading=True),))


def _local_sgd(algorithm: LocalSGD, nodes: Sequence[int], sizes: Sequence[int]) -> Cost:
    count, members = sum(sizes), algorithm.group_size
    models = algorithm.groups_of(len(nodes))
    groups = _groups(len(nodes), members)
    peers = [list(range(place, len(nodes), members)) for place in range(members)]
    between = Load(nodes)
    if not algorithm.sharded:
        between.all_reduce(peers, count)
        within = [_gradients(nodes, groups, sizes, algorithm.segment_bytes)] if members > 1 else []
        return Cost((*within, Phase(between, algorithm.interval)))
    if models > 1:
        between.all_reduce(peers, count / members)
    segments = math.ceil(count / algorithm.segment_bytes)
    shards = [count / members] * members
    to_owner, from_owner = Load(nodes), Load(nodes)
    to_owner.gradients = len(sizes)
    to_owner.exchange(groups, ToOwner(members), shards)
    from_owner.exchange(groups, FromOwner(members), shards)
    return Cost((Phase(to_owner, hides=1 - 1 / segments), Phase(from_owner), Phase(between, algorithm.interval)))


def _skipping(algorithm: ParameterSkipping, nodes: Sequence[int], sizes: Sequence[int]) -> Cost:
    """At most: what is skipped depends on the training."""
    everybody, load, roles = list(range(len(nodes))), Load(nodes), algorithm.roles(nodes)
    items = _cut(sizes, algorithm.block_bytes) if algorithm.granularity == "block" else list(sizes)
    load.all_reduce([roles.workers], len(items))
    if algorithm.exchange == "allreduce":
        load.all_reduce([everybody], sum(sizes))
        return Cost((Phase(load),))
    servers = algorithm.serving_ranks(len(nodes))
    served = [0.0] * len(nodes)
    pieces = _cut(items, piece_bytes(sum(sizes), len(servers)))
    for size, place in zip(pieces, place_by_size(pieces, len(servers))):
        served[servers[place]] += size
    if roles.helpers:
        load.exchange([everybody], FromOwner(len(nodes)), [len(items)])
    load.exchange([everybody], ToOwner(len(nodes), len(roles.workers)), served)
    load.exchange([everybody], FromOwner(len(nodes), len(roles.workers)), served)
    return Cost((Phase(load),))


def _cut(sizes: Sequence[int], limit: int) -> list[int]:
    return [min(limit, size - begin) for size in sizes for begin in range(0, size, limit)]


def _asynchronous(algorithm: ADPSGD | ScheduledPull, nodes: Sequence[int], sizes: Sequence[int]) -> Cost:
    """On average: who is drawn how often is chance. Both have copies of the parameters to make in every step."""
    size, count = len(nodes), sum(sizes)
    load, copies = Load(nodes), Load(nodes)
    pairs = isinstance(algorithm, ADPSGD)
    for _ in range(2 if pairs else 1):
        load.exchange([list(range(size))], RandomCycle(size, algorithm.seed), [count])
    copies.memory = [(8 if pairs else 2) * count for _ in nodes]
    hidden = algorithm.overlap not in (0, "none")
    return Cost((Phase(load, algorithm.interval, float(hidden), step=hidden), Phase(copies)))


def _gossip(algorithm: GossipAlgorithm, nodes: Sequence[int], names: Sequence[str], sizes: Sequence[int]) -> Cost:
    size, count = len(nodes), sum(sizes)
    if isinstance(algorithm, ElasticAveraging):
        load = Load(nodes)
        load.all_reduce([list(range(size))], count)
        # A copy to average, and both movements of the worker and of its centre.
        load.memory = [value + 8 * count if _together(nodes, rank) else value for rank, value in enumerate(load.memory)]
        return Cost((Phase(load, algorithm.interval),))
    segments = _segments(algorithm.segments, names, sizes)
    overlaps = isinstance(algorithm, PushSum) and algorithm.overlap > 0
    phases = []
    for round in range(_ROUNDS):
        load = Load(nodes)
        for topology in algorithm.rounds_of(size, len(segments)):
            load.exchange([list(range(size))], topology, segments, round)
        phases.append(Phase(load, algorithm.interval * _ROUNDS, float(overlaps), step=overlaps))
    members = algorithm.workers_in_group
    if members > 1:
        within = _gradients(nodes, _groups(size, members), sizes, algorithm.segment_bytes)  # type: ignore[union-attr]
        phases.append(within)
    return Cost(tuple(phases))


def _together(nodes: Sequence[int], rank: int) -> bool:
    return list(nodes).count(nodes[rank]) > 1


def _segments(segments: Segments | Sequence[str], names: Sequence[str], sizes: Sequence[int]) -> list[float]:
    numbers = segment_numbers(names, sizes, segments)
    found = [0.0] * (max(numbers) + 1)
    for number, size in zip(numbers, sizes):
        found[number] += size
    return found
