"""Table of the algorithms that tests run, taken from the registry. A new algorithm is tested everywhere as soon as it
is registered.

Tests add settings that deserve a case of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

from sordino.algorithms import Algorithm, names, resolve
from sordino.algorithms.gossip import AveragingGossip, Gossip, MixingGossip

Table = dict[str, Algorithm]
DEFAULTS: Table = {name: resolve(name) for name in names()}
"""Every algorithm with its default settings, by name."""


def chosen(condition: Callable[[Algorithm], bool]) -> Table:
    return {name: one for name, one in DEFAULTS.items() if condition(one)}


def has(algorithm: Algorithm, setting: str) -> bool:
    return setting in {one.name for one in fields(algorithm)}


def often(algorithm: Algorithm) -> Algorithm:
    """Return the algorithm with an exchange at least every second step, for short trainings."""
    if not has(algorithm, "interval"):
        return algorithm
    return replace(algorithm, interval=min(2, algorithm.interval))  # type: ignore[attr-defined, call-arg]


def only_mixes(algorithm: Algorithm) -> bool:
    """Return whether an exchange only mixes parameters by a topology, without an outer step."""
    return isinstance(algorithm, MixingGossip) and algorithm.optional_state <= AveragingGossip.optional_state


def keeps_the_sum(algorithm: Algorithm) -> bool:
    """Return whether an exchange leaves the sum over the workers unchanged."""
    if not only_mixes(algorithm):
        return False
    assert isinstance(algorithm, MixingGossip)
    size = 4
    topologies = algorithm.rounds_of(size, 1)
    sums = [0.0] * size
    for topology in topologies:
        for rank in range(size):
            sources, keeps_own, scale = topology.row(0, 0, rank)
            for one in [*sources, *[rank] * keeps_own]:
                sums[one] += scale
    return algorithm.weighted or all(abs(one - len(topologies)) < 1e-9 for one in sums)


SYNCHRONOUS = chosen(lambda one: one.traits.synchronous)
"""Workers take their steps together."""
EXCHANGING = chosen(lambda one: one.traits.synchronous and not one.traits.same_gradients)
"""Workers take their steps together, with their own gradients, and exchange parameters."""
ASYNCHRONOUS = chosen(lambda one: not one.traits.synchronous)
"""Workers do not wait for each other's steps."""
SURVIVING = chosen(lambda one: one.traits.ends_with is None)
"""The remaining ranks can continue after a loss of a rank."""
GOSSIPING = chosen(lambda one: isinstance(one, Gossip))
"""Derived from `Gossip`."""
MIXING = chosen(only_mixes)
"""These algorithms differ only in their topology."""
CONSERVING = chosen(keeps_the_sum)
"""A mixing leaves the sum over the workers unchanged."""
ENCODING = chosen(lambda one: isinstance(one, AveragingGossip) and has(one, "compression"))
"""Mixings with `compression=`, which send modulo codes of parameters."""
SHARDED = chosen(lambda one: one.traits.whole_parameters is None)
"""Parameters may be sharded over a device mesh, with the default settings."""
