"""Registry of algorithms: of this package, of other packages that register some, and any class as module:Class.

A package registers an algorithm in its pyproject.toml:

    [project.entry-points."sordino.algorithms"]
    ema-gossip = "my_package.gossip:EmaGossip"
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import is_dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Literal

from sordino.algorithms.base import Algorithm
from sordino.errors import UsageError
from sordino.suggestions import meant

GROUP = "sordino.algorithms"

AlgorithmName = Literal[
    "adpsgd",
    "allreduce",
    "caps",
    "crossover",
    "diloco",
    "dpsgd",
    "elastic-averaging",
    "gossipgrad",
    "layered",
    "local-sgd",
    "noloco",
    "push-sum",
    "scheduled-pull",
    "segmented-gossip",
    "sparse-loco",
]
"""Names of this package's algorithms, for type checkers. Other strings are valid, too (`names`, or module:Class)."""

_SHIPPED: dict[AlgorithmName, str] = {
    "adpsgd": "sordino.algorithms.adpsgd:ADPSGD",
    "allreduce": "sordino.algorithms.allreduce:AllReduce",
    "caps": "sordino.algorithms.caps:CaPS",
    "crossover": "sordino.algorithms.crossover:Crossover",
    "diloco": "sordino.algorithms.diloco:DiLoCo",
    "dpsgd": "sordino.algorithms.dpsgd:DPSGD",
    "elastic-averaging": "sordino.algorithms.elastic_averaging:ElasticAveraging",
    "gossipgrad": "sordino.algorithms.gossipgrad:GossipGraD",
    "layered": "sordino.algorithms.layered:Layered",
    "local-sgd": "sordino.algorithms.local_sgd:LocalSGD",
    "noloco": "sordino.algorithms.noloco:NoLoCo",
    "push-sum": "sordino.algorithms.push_sum:PushSum",
    "scheduled-pull": "sordino.algorithms.scheduled_pull:ScheduledPull",
    "segmented-gossip": "sordino.algorithms.segmented_gossip:SegmentedGossip",
    "sparse-loco": "sordino.algorithms.sparse_loco:SparseLoCo",
}

_FORMER = {"elasticaveraging": "elastic-averaging", "pushsum": "push-sum", "segmentedgossip": "segmented-gossip"}
"""Names of earlier versions, which work with a warning."""


@functools.cache
def _known() -> dict[str, EntryPoint]:
    """Return the entry points of all algorithms, by name. Other packages cannot redefine this package's names."""
    shipped = {name: EntryPoint(name, where, GROUP) for name, where in _SHIPPED.items()}
    return {one.name: one for one in entry_points(group=GROUP)} | shipped


def names() -> list[str]:
    """Return the names that `algorithm=` and `--algorithm` accept, besides module:Class."""
    return sorted(_known())


def current_name(name: str) -> str:
    """Return the present name of an algorithm, with a FutureWarning for a former name. Others are returned as given."""
    if name in _FORMER:
        warnings.warn(f"algorithm {name!r} is called {_FORMER[name]!r} now", FutureWarning, stacklevel=3)
    return _FORMER.get(name, name)


def class_of(name: str) -> type[Algorithm]:
    """Return the class of an algorithm, by its name or as module:Class. A former name works with a FutureWarning.

    Raises:
        UsageError: the name is unknown, the class cannot be imported, or it is not an algorithm.
    """
    name = current_name(name)
    known = _known().get(name)
    if known is None and ":" not in name:
        raise UsageError(
            f"unknown algorithm {name!r}; use one of {', '.join(names())}, or module:Class{meant(name, names())}"
        )
    entry = known or EntryPoint(name, name, GROUP)
    try:
        found = entry.load()
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"algorithm {name!r}: {entry.value} cannot be imported: {error}") from error
    if not isinstance(found, type) or not issubclass(found, Algorithm) or not is_dataclass(found):
        raise UsageError(f"algorithm {name!r}: {entry.value} is not a dataclass that derives from {GROUP}.Algorithm")
    return found


def named(name: str) -> Algorithm:
    """Return an algorithm by its name, with default settings.

    Raises:
        UsageError: as `class_of`, or a setting has no default.
    """
    found = class_of(name)
    try:
        return found()
    except TypeError as error:
        raise UsageError(f"algorithm {name!r} has settings without a default: {error}") from error


def resolve(algorithm: Algorithm | str | None) -> Algorithm:
    """Return an algorithm that is given as an instance, by name (with default settings) or as None (`AllReduce()`).

    Raises:
        UsageError: the argument is something else, or an unknown name.
    """
    if algorithm is None:
        return named("allreduce")
    if isinstance(algorithm, str):
        return named(algorithm)
    if isinstance(algorithm, Algorithm):
        return algorithm
    given = type(algorithm).__name__
    raise UsageError(f"algorithm= takes an algorithm of sordino.algorithms, its name or None, not {given}")
