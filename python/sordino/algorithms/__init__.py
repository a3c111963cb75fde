"""The ways of communicating that `DistributedOptimizer(algorithm=...)` offers.

Each is a frozen dataclass whose fields are its hyper-parameters in the terms of its paper, checked on construction.
"""

from __future__ import annotations

from sordino.algorithms.allreduce import AllReduce
from sordino.algorithms.gossip import DPSGD, Crossover, ElasticAveraging, GossipGraD, PushSum, SegmentedGossip
from sordino.algorithms.layered import Layered
from sordino.algorithms.local import AdaptiveInterval, LocalSGD
from sordino.algorithms.skipping import ParameterSkipping, ThresholdScheduler
from sordino.algorithms.wide_area import ADPSGD, ScheduledPull
from sordino.errors import UsageError

__all__ = [
    "ADPSGD",
    "DPSGD",
    "AdaptiveInterval",
    "Algorithm",
    "AllReduce",
    "Crossover",
    "ElasticAveraging",
    "GossipAlgorithm",
    "GossipGraD",
    "Layered",
    "LocalSGD",
    "MixingAlgorithm",
    "ParameterSkipping",
    "PushSum",
    "ScheduledPull",
    "SegmentedGossip",
    "ThresholdScheduler",
    "kind_of",
    "names",
    "resolve",
]

MixingAlgorithm = Crossover | DPSGD | GossipGraD | PushSum | SegmentedGossip
GossipAlgorithm = MixingAlgorithm | ElasticAveraging
Algorithm = ADPSGD | AllReduce | GossipAlgorithm | Layered | LocalSGD | ParameterSkipping | ScheduledPull

_BY_NAME: dict[str, type[Algorithm]] = {
    "adpsgd": ADPSGD,
    "allreduce": AllReduce,
    "caps": ParameterSkipping,
    "crossover": Crossover,
    "dpsgd": DPSGD,
    "elasticaveraging": ElasticAveraging,
    "gossipgrad": GossipGraD,
    "layered": Layered,
    "local-sgd": LocalSGD,
    "pushsum": PushSum,
    "scheduled-pull": ScheduledPull,
    "segmentedgossip": SegmentedGossip,
}


def names() -> list[str]:
    """The names that `algorithm=` and `--algorithm` take."""
    return sorted(_BY_NAME)


def kind_of(algorithm: Algorithm) -> type[Algorithm]:
    """The class of this module that an algorithm is of; that of a user may be derived from it."""
    known: dict[type, type[Algorithm]] = {kind: kind for kind in _BY_NAME.values()}
    return next(known[kind] for kind in type(algorithm).__mro__ if kind in known)


def resolve(algorithm: Algorithm | str | None) -> Algorithm:
    """An algorithm from an instance, a name (its defaults) or None (`AllReduce()`). UsageError for anything else."""
    if algorithm is None:
        return AllReduce()
    if isinstance(algorithm, str):
        if algorithm not in _BY_NAME:
            raise UsageError(f"unknown algorithm {algorithm!r}; known are: {', '.join(names())}")
        return _BY_NAME[algorithm]()
    if isinstance(algorithm, tuple(_BY_NAME.values())):
        return algorithm
    kind = type(algorithm).__name__
    raise UsageError(f"algorithm= takes an algorithm of sordino.algorithms, its name or None, not {kind}")
