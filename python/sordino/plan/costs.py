"""Cost of a step's communication, counted from the same rings and topologies that the core uses.

T = s alpha + w beta (Lee et al., equation 3), where s is the number of messages that follow one another, and w the
number of bytes through the busiest node's link in one direction. In addition, the bytes that the ranks of a node move
in shared memory take time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from sordino._core import MOST_DOUBLED, Topology, all_reduce_rounds, all_reduce_teams
from sordino.algorithms import Algorithm
from sordino.algorithms.traffic import Exchange, Model, Operation, Reduction
from sordino.algorithms.traffic import Phase as TrafficPhase
from sordino.codecs import Codec

BACKWARD = 2 / 3  # fraction of the computation, since backward costs about twice as much as forward
_CACHED = 0.25  # cost of reading recently read data, relative to reading from memory
_ROUNDS = 8  # rounds of a random topology whose mean is taken


class Line(NamedTuple):
    """Cost of one kind of path between ranks: seconds per message, and seconds per byte."""

    alpha: float
    beta: float


@dataclass(frozen=True)
class Rates:
    """Costs on a machine.

    Attributes:
        inside: cost in a node's memory, per byte that a rank reads or writes. None: unknown, and counted as 0.
        across: cost through a node's link, per byte in one direction while as many bytes go in the other. None: not
            measured.
        agreement: seconds to agree that an operation can start. Exchanges need no agreement.
        hop: seconds from one rank of a ring to the next, without the bytes, for ranks on several nodes.
        handling: seconds of software per gradient, since an optimizer handles gradients tensor by tensor.
    """

    inside: Line | None
    across: Line | None
    agreement: float
    hop: float = 0.0
    handling: float = 0.0

    def as_results(self) -> dict[str, object]:
        """Return the rates for a JSON file."""
        lines = {"inside": self.inside, "across": self.across}
        places = {place: None if line is None else line._asdict() for place, line in lines.items()}
        return {**places, "agreement": self.agreement, "hop": self.hop, "handling": self.handling}

    @classmethod
    def from_results(cls, results: Mapping[str, Any]) -> Rates:
        """Return the rates from the result of `as_results`."""
        lines = {place: results[place] and Line(**results[place]) for place in ("inside", "across")}
        return cls(**{**results, **lines})


class Load:
    """Work of all ranks at the same time, in one phase of a step.

    Args:
        nodes: the node of each rank, numbered from 0.

    Attributes:
        sent: bytes that each rank sends to other nodes.
        memory: bytes that each rank reads and writes in the memory of its node.
        messages: messages between nodes that follow one another, except in rings.
        hops: hops of rings.
        gradients: number of tensors.
        agreements: number of operations that need an agreement.
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
        """Return the duration in seconds."""
        total = self.agreements * rates.agreement + self.gradients * rates.handling
        if rates.across is not None:
            total += self.messages * rates.across.alpha + self.hops * rates.hop + self.link * rates.across.beta
        if rates.inside is not None and max(self.memory) > 0:
            total += rates.inside.alpha * (self.messages + self.hops == 0) + max(self.memory) * rates.inside.beta
        return total

    def send(self, source: int, target: int, count: float) -> None:
        """Count the messages that carry `count` bytes from one rank to another."""
        if self.nodes[source] == self.nodes[target]:
            # The bytes are copied into MPI's memory and out of it.
            self.memory[source] += 2 * count
            self.memory[target] += 2 * count
            return
        self.sent[source] += count
        self._out[self.nodes[source]] += count
        self._into[self.nodes[target]] += count

    def all_reduce(self, sets: Sequence[Sequence[int]], count: float, segments: int = 1) -> None:
        """Count all-reduces of `count` bytes within sets of ranks, at the same time.

        The ranks of a node share memory. Each rank that takes part reads its shard of all inputs, and writes it to all
        results (csrc/collectives/allreduce_node.cc). Between nodes, teams of one rank per node reduce their shares by
        messages, with the schedule of the core (csrc/topology/schedule.h).
        """
        if len(sets[0]) == 1:
            return
        self.agreements += segments
        self._reduce(sets, count, count / segments <= MOST_DOUBLED)

    def _reduce(self, sets: Sequence[Sequence[int]], count: float, small: bool) -> None:
        most = 1
        for ranks in sets:
            by_node: dict[int, list[int]] = {}
            for rank in ranks:
                by_node.setdefault(self.nodes[rank], []).append(rank)
            sites = list(by_node.values())
            for site in sites:
                for rank in site:
                    self.memory[rank] += 2 * count * (len(site) > 1)
            most = max(most, len(sites))
            rounds = all_reduce_rounds(len(sites), small)
            teams = all_reduce_teams(sites, small) if rounds else []
            for team, one in product(teams, rounds):
                for source, target in zip(one.sources, one.targets):
                    self.send(team[source], team[target], one.repeats * one.share * count / len(teams))
        one_after_another = sum(one.repeats for one in all_reduce_rounds(most, small))
        if small:
            self.messages += one_after_another
        else:
            self.hops += one_after_another

    def exchange(
        self, sets: Sequence[Sequence[int]], topology: Topology, segments: Sequence[float], round: int = 0
    ) -> None:
        """Count exchanges within sets of ranks, at the same time (csrc/collectives/exchange.cc).

        Args:
            sets: the ranks of each set.
            topology: topology among the members of a set, by their places.
            segments: bytes of each segment.
            round: number of the exchange, which determines the topology's sources.
        """
        if topology.is_mean_of_all:
            apart = [ranks for ranks in sets if len({self.nodes[rank] for rank in ranks}) > 1]
            self._reduce(apart, sum(segments), sum(segments) <= MOST_DOUBLED)
            sets = [ranks for ranks in sets if len({self.nodes[rank] for rank in ranks}) == 1]
        before = sum(self.sent)
        for ranks in sets:
            for segment, count in enumerate(segments):
                rows = [topology.row(round, segment, place) for place in range(len(ranks))]
                self._travel(ranks, [sources for sources, _, _ in rows], count)
                self._mix(ranks, rows, count)
        self.messages += sum(self.sent) > before

    def exchange_separately(
        self, sets: Sequence[Sequence[int]], topology: Topology, segments: Sequence[float], round: int = 0
    ) -> None:
        """Count exchanges in which each rank gets a message from each of its sources. Arguments as in `exchange`."""
        before = sum(self.sent)
        for ranks in sets:
            for segment, count in enumerate(segments):
                for place, rank in enumerate(ranks):
                    for source in topology.row(round, segment, place)[0]:
                        self.send(ranks[source], rank, count)
        self.messages += sum(self.sent) > before

    def _travel(self, ranks: Sequence[int], sources_of: Sequence[Sequence[int]], count: float) -> None:
        """Count the bytes between nodes. Data that several ranks of a node need from another node travel once."""
        travels: dict[tuple[int, int], int] = {}
        for rank, sources in zip(ranks, sources_of):
            for source in sources:
                if self.nodes[ranks[source]] != self.nodes[rank]:
                    travels.setdefault((ranks[source], self.nodes[rank]), rank)
        for (source, _), target in travels.items():
            self.send(source, target, count)

    def _mix(self, ranks: Sequence[int], rows: Sequence[tuple[list[int], bool, float]], count: float) -> None:
        """Count memory reads and writes where the ranks of a node share the arithmetic.

        Each input is read once from memory, and then from caches. All results are written.
        """
        for node in {self.nodes[rank] for rank in ranks}:
            here = [place for place, rank in enumerate(ranks) if self.nodes[rank] == node]
            if len(here) == 1:
                continue  # a single rank mixes data as they arrive, which the link's rate includes
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
    """Load that recurs every `every` steps.

    Attributes:
        hides: largest fraction that can be hidden. Backward cannot hide the last segment.
        step: whether the whole next step can hide it, not only backward.
        loading: whether the time between two steps hides it, too.
        overlap: number of whole steps that can hide it, if it is above 1.
    """

    load: Load
    every: int = 1
    hides: float = 0.0
    step: bool = False
    loading: bool = False
    overlap: int = 0


@dataclass(frozen=True)
class Cost:
    """Work of an algorithm in a step, apart from computation."""

    phases: tuple[Phase, ...]

    def communication(self, rates: Rates) -> float:
        """Return the mean communication time per step, in seconds."""
        return sum(phase.load.seconds(rates) / phase.every for phase in self.phases)

    def exposed(self, rates: Rates, compute: float, loading: float = 0.0, slower: float = 1.0) -> float:
        """Return the mean communication time per step that cannot be hidden, in seconds.

        Args:
            rates: costs on the machine.
            compute: seconds of forward and backward, which hide a part of it.
            loading: seconds between two steps, which hide phases with `loading`.
            slower: factor by which everything takes longer than by the rates.
        """
        total = 0.0
        for phase in self.phases:
            seconds, steps = slower * phase.load.seconds(rates), max(1, phase.overlap)
            room = compute * (steps if phase.step else BACKWARD)
            left = seconds - min(seconds * phase.hides, room)
            total += (max(left - loading, 0.0) if phase.loading else left) / phase.every
        return total

    def sent(self) -> list[float]:
        """Return the mean bytes per step that each rank sends to other nodes."""
        parts = [[value / phase.every for value in phase.load.sent] for phase in self.phases]
        return [sum(values) for values in zip(*parts)]


def cost_of(
    algorithm: Algorithm,
    nodes: Sequence[int],
    names: Sequence[str],
    sizes: Sequence[int],
    codec: Codec | None = None,
    shapes: Sequence[Sequence[int]] | None = None,
) -> Cost:
    """Return the cost of a step.

    Args:
        algorithm: the algorithm.
        nodes: the node of each rank, numbered from 0.
        names: names of the parameters.
        sizes: bytes of each parameter.
        codec: codec of the gradients, `compression=` of `DistributedOptimizer`; None: they are sent as they are. The
            time to encode is not counted.
        shapes: the shape of each parameter, which `PowerSGD` needs; None: unknown.

    Raises:
        UsageError: the algorithm does not work with this number of ranks.
    """
    traffic = algorithm.traffic(Model(names, sizes, codec=codec, shapes=shapes), nodes)
    lasting = [phase for phase in traffic.phases if phase.until is None]
    return Cost(tuple(found for phase in lasting for found in _phases(phase, nodes)))


def _phases(phase: TrafficPhase, nodes: Sequence[int]) -> list[Phase]:
    """Return one phase or, for a phase that varies, one per round, so that their mean counts."""
    rounds = _ROUNDS if phase.varies else 1
    return [
        Phase(
            _load(phase.at(round), nodes), phase.every * rounds, phase.hides, phase.step, phase.loading, phase.overlap
        )
        for round in range(rounds)
    ]


def _load(operations: Sequence[Operation], nodes: Sequence[int]) -> Load:
    load = Load(nodes)
    for operation in operations:
        if isinstance(operation, Reduction):
            load.gradients += operation.tensors
            load.all_reduce(operation.sets.tolist(), sum(operation.buckets), len(operation.buckets))
        elif isinstance(operation, Exchange):
            load.gradients += operation.tensors
            count = load.exchange_separately if operation.separate else load.exchange
            count(operation.sets.tolist(), operation.topology, operation.segments, operation.round)
        else:
            load.memory = [there + operation.bytes for there in load.memory]
    return load
