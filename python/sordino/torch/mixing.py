"""What an exchange does to the parameters of one rank: three ways, each a class with the same few methods.

`Averaging` lets the core replace parameters by averages, where they are. `PushSumMixing` keeps the numerators of
push-sum in the same place during an exchange, and the model's values between exchanges. `ElasticMixing` needs no peers,
only an all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from sordino._core import Handle
from sordino.algorithms import ElasticAveraging, GossipAlgorithm, MixingAlgorithm, PushSum
from sordino.context import Context
from sordino.torch.exchanges import Channel
from sordino.torch.operation import Average
from sordino.torch.ops import grouped_allreduce_
from sordino.torch.parameters import FlatValues, ParameterArena
from sordino.torch.process_sets import ProcessSet


@dataclass(frozen=True)
class Meeting:
    """Where the ranks that exchange meet."""

    context: Context
    everybody: ProcessSet
    channel: Channel
    name: str
    place: int  # this rank's number among everybody
    judge: Callable[[Sequence[str], Sequence[torch.Tensor]], None]  # refuses tensors that must not be exchanged


class Mixing(Protocol):
    """What follows the optimizer's step every `interval` steps. All methods but `state` and
    `all_are_alike` are collective."""

    def begin(self) -> None:
        """Called before a step."""

    def all_are_alike(self) -> None:
        """Called, and not collective, when all ranks have been given the same parameters, and nothing is under way."""

    def exchange(self, round: int) -> None:
        """Mixes this rank's parameters with others'."""

    def flush(self) -> None:
        """Takes in what is still under way."""

    def state(self) -> dict[str, Any]:
        """What is kept in checkpoints."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Goes on from `state()`, with the parameters of now and nothing under way."""


class Averaging:
    """Parameters become averages of this rank's and others', in place."""

    def __init__(self, meeting: Meeting, arena: ParameterArena, algorithm: MixingAlgorithm) -> None:
        self.meeting = meeting
        self.arena = arena
        self.topologies = algorithm.rounds_of(len(meeting.everybody.ranks or []), arena.segment_count)

    def begin(self) -> None:
        pass

    def all_are_alike(self) -> None:
        pass

    def exchange(self, round: int) -> None:
        for step in range(len(self.topologies)):
            self.start(round, step, self.arena, others_only=False).wait()

    def start(self, round: int, step: int, values: FlatValues, others_only: bool) -> Handle:
        """Begins one mixing of an exchange, of `values` in place; with `others_only` without this rank's share in it.
        What is waited for at once is done at once."""
        name = f"{self.meeting.name}.{round}.{step}"
        return self.meeting.channel.start(name, self.topologies[step], values, round, others_only, wait=not others_only)

    def flush(self) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        pass


class PushSumMixing(Averaging):
    """Push-sum. Between exchanges the arena holds z = x / weight, in one x and the weights.

    The optimizer changes z by some d, and x by the same: x = weight * z_before + d = z + (weight - 1) * z_before. Only
    where weights are not 1 must z_before be known, so without overlap an exchange costs no more than an averaging.
    """

    def __init__(self, meeting: Meeting, arena: ParameterArena, algorithm: PushSum) -> None:
        super().__init__(meeting, arena, algorithm)
        self._overlap = algorithm.overlap
        self._before: FlatValues | None = None  # z after the last exchange, if a weight was not 1
        self._under_way: list[tuple[Handle, FlatValues]] = []  # oldest first
        self._spare: list[FlatValues] = []

    @torch.no_grad()
    def exchange(self, round: int) -> None:
        self._to_numerators()
        try:
            if self._overlap == 0:
                super().exchange(round)
            else:
                if len(self._under_way) == self._overlap:
                    self._absorb()
                self._send(round)
        finally:
            self._to_values()

    @torch.no_grad()
    def flush(self) -> None:
        if not self._under_way:
            return
        self._to_numerators()
        try:
            while self._under_way:
                self._absorb()
        finally:
            self._to_values()

    def load_state(self, state: dict[str, Any]) -> None:
        # What is under way belongs to the parameters of before.
        while self._under_way:
            handle, parcel = self._under_way.pop(0)
            handle.wait()
            self._spare.append(parcel)
        for weight in self.arena.weights:
            weight.fill_(1)
        self._before = None

    def _new_values(self) -> FlatValues:
        return FlatValues(self.meeting.context, self.arena.layout, self.arena.kind)

    def _send(self, round: int) -> None:
        parcel = self._spare.pop() if self._spare else self._new_values()
        parcel.copy_(self.arena)
        self._under_way.append((self.start(round, 0, parcel, others_only=True), parcel))
        for segment, run in self.arena.runs:
            run.mul_(self.topologies[0].row(round, segment, self.meeting.place)[2])

    def _absorb(self) -> None:
        handle, parcel = self._under_way[0]
        handle.wait()
        del self._under_way[0]
        self.arena.add_(parcel)
        self._spare.append(parcel)

    def _to_numerators(self) -> None:
        if self._before is None:
            return
        weights = self._weights()
        for (segment, run), (_, before) in zip(self.arena.runs, self._before.runs):
            run.add_(before, alpha=weights[segment] - 1)
        self._restore(weights)

    def _to_values(self) -> None:
        weights = self._weights()
        if all(weight == 1 for weight in weights):
            self._before = None
            return
        for segment, run in self.arena.runs:
            run.div_(weights[segment])
        self._restore(weights)
        if self._before is None:
            self._before = self._new_values()
        self._before.copy_(self.arena)

    def _weights(self) -> list[float]:
        """All at once: of a GPU's memory that is one wait."""
        found: list[float] = torch.cat(self.arena.weights).tolist()
        return found

    def _restore(self, weights: list[float]) -> None:
        """Weights lie among the values that have just been computed with."""
        for weight, value in zip(self.arena.weights, weights):
            weight.fill_(value)


class ElasticMixing:
    """Every worker is drawn towards a centre that all have, and it towards their mean."""

    def __init__(self, meeting: Meeting, arena: ParameterArena, algorithm: ElasticAveraging) -> None:
        self._meeting = meeting
        self._arena = arena
        self._rate = algorithm.moving_rate
        self._size = len(meeting.everybody.ranks or [])
        self._centre = FlatValues(meeting.context, arena.layout, arena.kind)
        self._mean = FlatValues(meeting.context, arena.layout, arena.kind)
        self._begun = False

    def begin(self) -> None:
        if not self._begun:
            self._arena.adopt()
            self._meeting.judge(self._arena.names, self._arena.tensors)
            self._centre.copy_(self._average())
            self._begun = True

    def all_are_alike(self) -> None:
        # The centre is what all have. To find it in the next step would be to wait there for ranks that have no next
        # step: where a rank has been lost, some may be a step behind others.
        self._arena.adopt()
        self._centre.copy_(self._arena)
        self._begun = True

    @torch.no_grad()
    def exchange(self, round: int) -> None:
        mean = self._average()
        for (_, mine), (_, centre), (_, average) in zip(self._arena.runs, self._centre.runs, mean.runs):
            mine.lerp_(centre, self._rate / self._size)
            centre.lerp_(average, self._rate)

    def flush(self) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {"centre": [run.clone() for _, run in self._centre.runs]} if self._begun else {}

    def load_state(self, state: dict[str, Any]) -> None:
        saved = state.get("centre", [])
        shapes = [(run.dtype, run.shape) for _, run in self._centre.runs]
        # Of other parameters: then the centre is found anew.
        self._begun = [(run.dtype, run.shape) for run in saved] == shapes
        if self._begun:
            for (_, run), values in zip(self._centre.runs, saved):
                run.copy_(values)

    def _average(self) -> FlatValues:
        self._mean.copy_(self._arena)
        runs = [run for _, run in self._mean.runs]
        meeting = self._meeting
        grouped_allreduce_(runs, op=Average, name=f"{meeting.name}.mean", process_set=meeting.everybody)
        return self._mean


def mixing_of(meeting: Meeting, arena: ParameterArena, algorithm: GossipAlgorithm) -> Mixing:
    """How an algorithm mixes."""
    if isinstance(algorithm, ElasticAveraging):
        return ElasticMixing(meeting, arena, algorithm)
    if isinstance(algorithm, PushSum):
        return PushSumMixing(meeting, arena, algorithm)
    return Averaging(meeting, arena, algorithm)
