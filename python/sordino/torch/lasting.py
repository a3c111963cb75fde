"""Which of what users ask for can go on when a rank is lost, and what becomes of its settings among fewer ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sordino import _core
from sordino.algorithms import (
    Algorithm,
    AllReduce,
    Crossover,
    Layered,
    LocalSGD,
    ParameterSkipping,
    PushSum,
    ScheduledPull,
    SegmentedGossip,
)
from sordino.context import Context
from sordino.errors import UsageError
from sordino.torch.helpers import helped
from sordino.torch.process_sets import ProcessSet

_INSTEAD = 'use on_peer_lost="raise", and start the job with `sordino run --restarts N` to go on from checkpoints'


def goes_on(on_peer_lost: str | None, algorithm: Algorithm | str | None) -> bool:
    """Whether ranks go on without those that are lost, as `init` is told, or else the environment.

    Raises:
        UsageError: what is said is neither "raise" nor "continue", or ranks without a model are to help the others.
    """
    if on_peer_lost not in (None, "raise", "continue"):
        raise UsageError(f"on_peer_lost={on_peer_lost!r} is neither 'raise' nor 'continue'")
    wanted = _core.outlasts() if on_peer_lost is None else on_peer_lost == "continue"
    if wanted and helped(algorithm) is not None:
        raise UsageError(f"on_peer_lost='continue' does not go with ranks that have no model; {_INSTEAD}")
    return wanted


def check_outlasting(options: dict[str, Any], adasum: bool) -> None:
    """UsageError for options of `DistributedOptimizer` with which a rank that is lost takes something with it."""
    algorithm = options["algorithm"]
    problem = None
    if adasum:
        problem = "op=Adasum"
    elif isinstance(algorithm, AllReduce) and algorithm.double_buffering:
        problem = "AllReduce(double_buffering=True)"
    elif isinstance(algorithm, Layered):
        problem = "Layered"
    elif isinstance(algorithm, LocalSGD) and algorithm.sharded:
        problem = 'LocalSGD(exchange="sharded")'
    elif isinstance(algorithm, ParameterSkipping) and algorithm.exchange == "parameter-server":
        problem = 'ParameterSkipping(exchange="parameter-server")'
    if problem is not None:
        raise UsageError(f"{problem} does not go on without ranks that are lost: {_INSTEAD}")


def members_of(context: Context, process_set: ProcessSet) -> tuple[int, ...]:
    """Who the members of a process set are, through all worlds; nobody, of one that is not registered."""
    if process_set.process_set_id is None:
        return ()
    return tuple(context.world.identities[rank] for rank in process_set.ranks or [])


def fitted(context: Context, algorithm: Algorithm, before: Sequence[int], process_set: ProcessSet) -> Algorithm:
    """An algorithm for those members of a process set that are left: with the largest groups that divide them, up to
    the size that was asked for, as many peers as there are, weights among them, and the same manager, or the first
    rank.

    Args:
        before: the members that the algorithm was chosen for.
    """
    now = members_of(context, process_set)
    if len(now) == len(before) or not now:
        return algorithm
    changes: dict[str, Any] = {}
    if isinstance(algorithm, (Crossover, LocalSGD)):
        changes["group_size"] = max(k for k in range(1, algorithm.group_size + 1) if len(now) % k == 0)
    if isinstance(algorithm, Crossover) and algorithm.roulette is not None:
        changes["roulette"] = _among(algorithm.roulette, before, now) if algorithm.group_size == 1 else None
    if isinstance(algorithm, SegmentedGossip):
        changes["replicas"] = min(algorithm.replicas, max(1, len(now) - 1))
    if isinstance(algorithm, PushSum):
        most = max(1, (len(now) - 1).bit_length())
        changes["peers"] = {begin: min(count, most) for begin, count in algorithm.stages.items()}
    if isinstance(algorithm, ScheduledPull) and algorithm.managed:
        manager = before[algorithm.manager]
        changes["manager"] = now.index(manager) if manager in now else 0
    return replace(algorithm, **changes)


def _among(
    weights: Sequence[Sequence[float]], before: Sequence[int], now: Sequence[int]
) -> tuple[tuple[float, ...], ...] | None:
    """The weights among those that are left; None, for even ones, where somebody would have nobody to meet."""
    places = [before.index(one) for one in now]
    part = tuple(tuple(float(weights[i][j]) for j in places) for i in places)
    met = all(any(row[:i] + row[i + 1 :]) for i, row in enumerate(part))
    return part if met and all(any(column[:j] + column[j + 1 :]) for j, column in enumerate(zip(*part))) else None
