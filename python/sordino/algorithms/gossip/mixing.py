"""What an exchange does to the parameters of one rank: a few methods, which each kind of gossip has a class for.

`Averaging` lets the core replace parameters by averages, where they are; push-sum and elastic averaging have their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from sordino._core import Handle
from sordino.algorithms.gossip import MixingGossip
from sordino.runtime.channel import Channel
from sordino.runtime.context import Context
from sordino.runtime.flat_buffer import FlatBuffer, ParameterBuffer
from sordino.runtime.process_set import ProcessSet


@dataclass(frozen=True)
class Peers:
    """The ranks that exchange, as one of them sees them."""

    context: Context
    process_set: ProcessSet
    channel: Channel
    name: str
    index: int  # of this rank among them
    judge: Callable[[Sequence[str], Sequence[torch.Tensor]], None]  # refuses tensors that must not be exchanged


class Mixing(Protocol):
    """What follows the optimizer's step every `interval` steps.

    All methods but `state` and `all_are_alike` are collective.
    """

    def begin(self) -> None:
        """Do what precedes a step."""

    def all_are_alike(self) -> None:
        """Note that all ranks have been given the same parameters, and nothing is under way. Not collective."""

    def exchange(self, round: int) -> None:
        """Mix this rank's parameters with others'."""

    def flush(self) -> None:
        """Take in what is still under way."""

    def state(self) -> dict[str, Any]:
        """Return what is kept in checkpoints."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from `state()`, with the parameters of now and nothing under way."""


class Averaging:
    """Parameters become averages of this rank's and others', in place."""

    def __init__(self, peers: Peers, arena: ParameterBuffer, algorithm: MixingGossip) -> None:
        self.peers = peers
        self.arena = arena
        self.topologies = algorithm.rounds_of(len(peers.process_set.ranks or []), arena.segment_count)

    def begin(self) -> None:
        pass

    def all_are_alike(self) -> None:
        pass

    def exchange(self, round: int) -> None:
        for step in range(len(self.topologies)):
            self.start(round, step, self.arena, others_only=False).wait()

    def start(self, round: int, step: int, values: FlatBuffer, others_only: bool) -> Handle:
        """Begin one mixing of an exchange, of `values` in place; with `others_only` without this rank's share in it.

        What is waited for at once is done at once.
        """
        name = f"{self.peers.name}.{round}.{step}"
        return self.peers.channel.start(name, self.topologies[step], values, round, others_only, wait=not others_only)

    def flush(self) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        pass
