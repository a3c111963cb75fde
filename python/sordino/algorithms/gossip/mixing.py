"""Interface of a mixing, which performs the exchanges of one rank, and the mixing that most algorithms use.

`Averaging` lets the core replace parameters by averages in place. Push-sum and elastic averaging have their own class.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from sordino._core import Handle
from sordino.algorithms.gossip import MixingGossip, only_averages
from sordino.algorithms.gossip.compressed import CompressedMixing, MixingStatistics
from sordino.runtime.collectives.ops import broadcast_
from sordino.runtime.context import Context
from sordino.runtime.exchange.channel import Channel
from sordino.runtime.exchange.flat_buffer import FlatBuffer, ParameterBuffer
from sordino.runtime.parameter_names import may_be_one
from sordino.runtime.process_set import ProcessSet


@dataclass(frozen=True)
class Peers:
    """The ranks that exchange, as seen by one of them."""

    context: Context
    process_set: ProcessSet
    channel: Channel
    name: str
    index: int  # position of this rank among them
    judge: Callable[[Sequence[str], Sequence[torch.Tensor]], None]  # raises for tensors that must not be exchanged
    statistics: MixingStatistics = field(default_factory=MixingStatistics)  # of encoded parameters


def take_from_first(peers: Peers, values: FlatBuffer) -> None:
    """Give all ranks the values of the first one. Collective."""
    first = (peers.process_set.ranks or [0])[0]
    for number, (_, run) in enumerate(values.runs):
        broadcast_(run, first, f"{peers.name}.begin.{number}", peers.process_set)


def is_of(state: Mapping[str, Any], values: ParameterBuffer, what: str) -> bool:
    """Return whether a state, whose tensors have the right sizes, is of these parameters. If not, warn.

    Names may differ by wrappers such as torch.compile, or be missing in the state or here.

    Args:
        state: the state, with the names of its parameters under "parameters". States of earlier versions lack them.
        values: the parameters.
        what: name of the values in the state, for the warning.
    """
    saved, now = state.get("parameters", values.plain_names), values.plain_names
    differ = [f"'{one}' and '{other}'" for one, other in zip(saved, now) if not may_be_one(one, other)]
    if differ:
        warnings.warn(
            f"{what} in the state are of other parameters ({differ[0]}, for example), so they are not used. Other "
            "parameters were frozen, or named_parameters= has other names",
            RuntimeWarning,
            stacklevel=2,
        )
    return not differ


class Mixing(Protocol):
    """Exchange of one rank's parameters, which follows the optimizer step every `interval` steps.

    All methods except `state` and `all_are_alike` are collective.
    """

    def begin(self) -> None:
        """Prepare a step of the optimizer."""

    def all_are_alike(self) -> None:
        """Note that all ranks now have the same parameters, and no exchange is in flight. Not collective."""

    def exchange(self, round: int) -> None:
        """Mix this rank's parameters with the parameters of its peers in this round."""

    def flush(self) -> None:
        """Apply the exchanges that are still in flight."""

    def state(self) -> dict[str, Any]:
        """Return the state for checkpoints."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from `state()`, with the current parameters and no exchange in flight."""


class OuterMixing(Mixing, Protocol):
    """Mixing whose exchange is a step of outer parameters."""

    def outer_parameters(self) -> AbstractContextManager[None]:
        """Return a context manager within which the model has the outer parameters, if training has begun."""


class Averaging:
    """Mixing that replaces parameters in place by averages of this rank's and its peers' values."""

    def __init__(self, peers: Peers, arena: ParameterBuffer, algorithm: MixingGossip) -> None:
        self.peers = peers
        self.arena = arena
        self.topologies = algorithm.rounds_of(len(peers.process_set.ranks or []), arena.segment_count)
        self._compressed = None if algorithm.codec is None else CompressedMixing(peers, arena, algorithm.codec)
        self._encoded = [algorithm.codec is not None and only_averages(topology) for topology in self.topologies]

    def begin(self) -> None:
        if self._compressed is not None:
            self._compressed.begin()

    def all_are_alike(self) -> None:
        if self._compressed is not None:
            self._compressed.restart()

    def exchange(self, round: int) -> None:
        self.mix(round, self.arena)

    def mix(self, round: int, values: FlatBuffer) -> None:
        """Perform all mixings of an exchange on `values`, in place. Values that workers copy are never encoded."""
        for step, topology in enumerate(self.topologies):
            if self._compressed is not None and self._encoded[step]:
                self._compressed.mix(round, topology, values)
            else:
                self.start(round, step, values, others_only=False).wait()

    def start(self, round: int, step: int, values: FlatBuffer, others_only: bool) -> Handle:
        """Start one mixing of an exchange on `values`, in place; with `others_only`, without this rank's own share.

        Without `others_only` this call returns only when the mixing has ended.
        """
        name = f"{self.peers.name}.{round}.{step}"
        return self.peers.channel.start(name, self.topologies[step], values, round, others_only, wait=not others_only)

    def flush(self) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {} if self._compressed is None else self._compressed.state()

    def load_state(self, state: dict[str, Any]) -> None:
        if self._compressed is not None:
            self._compressed.load_state(state)
