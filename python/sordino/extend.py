"""Everything that an algorithm outside of Sordino's package needs (docs/extending.md).

| to | there are |
|---|---|
| describe the algorithm | `Algorithm`, `Traits`, `Simulation`, `require`, `group_size_among` |
| derive a gossip algorithm that only chooses its peers | `Gossip`, `MixingGossip`, `AveragingGossip`, `RandomGossip` |
| describe its traffic | `Traffic`, `Phase`, `Exchange`, `Reduction`, `Copies`, `Model`, `gradients`, `groups_of` |
| choose peers | `Topology` and the topologies of the core |
| run in an optimizer | `Strategy`, `ExchangingStrategy`, `Runtime`, `Closure` |
| exchange parameters | `ParameterBuffer`, `FlatBuffer`, `Channel`, `new_channel`, `group_of`, `peers_of` |
| communicate otherwise | `allreduce`, `allgather_object`, `broadcast_object`, `ProcessSet`, `Context` |
"""

from __future__ import annotations

from sordino._core import (
    Dissemination,
    Exponential,
    FromOwner,
    Grouped,
    Mean,
    RandomCycle,
    RandomGroups,
    RandomPull,
    Ring,
    Roulette,
    Star,
    ToOwner,
    Topology,
)
from sordino.algorithms.base import Algorithm, Simulation, Traits, group_size_among
from sordino.algorithms.checks import require
from sordino.algorithms.exchanging import ExchangingStrategy
from sordino.algorithms.gossip import AveragingGossip, Gossip, MixingGossip, RandomGossip
from sordino.algorithms.strategy import Closure, Runtime, Strategy
from sordino.algorithms.traffic import Copies, Exchange, Model, Phase, Reduction, Traffic, gradients, groups_of
from sordino.errors import SordinoError, UsageError
from sordino.runtime.collectives.autograd import allreduce
from sordino.runtime.collectives.objects import allgather_object, broadcast_object
from sordino.runtime.context import Context
from sordino.runtime.exchange.channel import Channel
from sordino.runtime.exchange.flat_buffer import FlatBuffer, ParameterBuffer
from sordino.runtime.exchange.groups import group_of, new_channel, peers_of
from sordino.runtime.process_set import ProcessSet

__all__ = [
    "Algorithm",
    "AveragingGossip",
    "Channel",
    "Closure",
    "Context",
    "Copies",
    "Dissemination",
    "Exchange",
    "ExchangingStrategy",
    "Exponential",
    "FlatBuffer",
    "FromOwner",
    "Gossip",
    "Grouped",
    "Mean",
    "MixingGossip",
    "Model",
    "ParameterBuffer",
    "Phase",
    "ProcessSet",
    "RandomCycle",
    "RandomGossip",
    "RandomGroups",
    "RandomPull",
    "Reduction",
    "Ring",
    "Roulette",
    "Runtime",
    "Simulation",
    "SordinoError",
    "Star",
    "Strategy",
    "ToOwner",
    "Topology",
    "Traffic",
    "Traits",
    "UsageError",
    "allgather_object",
    "allreduce",
    "broadcast_object",
    "gradients",
    "group_of",
    "group_size_among",
    "groups_of",
    "new_channel",
    "peers_of",
    "require",
]
