"""Algorithms that `DistributedOptimizer(algorithm=...)` offers, each in a module or folder of its own.

Each algorithm is a frozen dataclass. Its fields are its hyper-parameters, named as in its paper and checked on
construction. To add one, derive from `Algorithm` and `Strategy` (docs/extending.md). A package can register it under a
name through the entry-point group `sordino.algorithms`.
"""

from __future__ import annotations

import warnings
from typing import Any

from sordino.algorithms.adpsgd import ADPSGD
from sordino.algorithms.allreduce import AllReduce
from sordino.algorithms.base import Algorithm, Simulation, Traits
from sordino.algorithms.caps import CaPS, ThresholdScheduler
from sordino.algorithms.crossover import Crossover
from sordino.algorithms.diloco import DiLoCo
from sordino.algorithms.dpsgd import DPSGD
from sordino.algorithms.elastic_averaging import ElasticAveraging
from sordino.algorithms.gossipgrad import GossipGraD
from sordino.algorithms.layered import Layered
from sordino.algorithms.local_sgd import AdaptiveInterval, LocalSGD
from sordino.algorithms.noloco import NoLoCo
from sordino.algorithms.push_sum import PushSum
from sordino.algorithms.registry import AlgorithmName, class_of, current_name, names, resolve
from sordino.algorithms.scheduled_pull import ScheduledPull
from sordino.algorithms.segmented_gossip import SegmentedGossip
from sordino.algorithms.settings import configured
from sordino.algorithms.sparse_loco import SparseLoCo

__all__ = [
    "ADPSGD",
    "DPSGD",
    "AdaptiveInterval",
    "Algorithm",
    "AlgorithmName",
    "AllReduce",
    "CaPS",
    "Crossover",
    "DiLoCo",
    "ElasticAveraging",
    "GossipGraD",
    "Layered",
    "LocalSGD",
    "NoLoCo",
    "PushSum",
    "ScheduledPull",
    "SegmentedGossip",
    "Simulation",
    "SparseLoCo",
    "ThresholdScheduler",
    "Traits",
    "class_of",
    "configured",
    "current_name",
    "names",
    "resolve",
]


def __getattr__(name: str) -> Any:
    """Return the class of a former name, with a FutureWarning."""
    if name == "ParameterSkipping":
        warnings.warn("ParameterSkipping is called CaPS now", FutureWarning, stacklevel=2)
        return CaPS
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
