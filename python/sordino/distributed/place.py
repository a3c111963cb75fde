"""Place of a group of torch.distributed: the world of its ranks, and the store and the time limit of their meeting.

The group of all ranks has the world of `sordino.torch.init()`, or makes it, so both can be used together.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed
from torch.distributed.constants import default_pg_timeout

from sordino.errors import UsageError
from sordino.rendezvous.find_start import called, find_start, forget, prefix_of
from sordino.rendezvous.starts import Start
from sordino.runtime.context import Context, current, current_or_none
from sordino.runtime.process_set import ProcessSet, global_process_set
from sordino.torch import lifecycle
from sordino.torch.start import survives_losses

dist: Any = torch.distributed  # its annotations lack much of what a backend uses


@dataclass
class Place:
    """A group as this rank sees it.

    Attributes:
        context: the world of its ranks.
        store: a store for this group alone.
        process_set: its ranks.
        owns: whether the world ends with the group.
        name: torch's name of the group; "" until torch has given it.
    """

    context: Context
    store: Any
    process_set: ProcessSet = global_process_set
    owns: bool = False
    name: str = ""


def find_place(store: Any, rank: int, size: int, timeout: timedelta) -> Place:
    """Return the place of a new group. Collective over its ranks.

    Args:
        store: torch's store for the group.
        rank: rank of this process in the group.
        size: number of ranks of the group.
        timeout: time limit for the ranks to meet, if it `is_chosen`.

    Raises:
        UsageError: `sordino.torch.init()` has given this process another rank, or the ranks continue after losses.
        Timeout: not all ranks have come in time; the error names them.
    """
    if dist.is_initialized():
        own, store = world_at(store, rank, size, timeout)
        return Place(own, store, owns=True)
    context = current_or_none()
    if survives_losses(None, None) if context is None else context.survives_losses:
        raise UsageError(
            "init_process_group: a group of torch.distributed keeps its ranks, so it cannot be used with "
            "on_peer_lost='continue', with which their numbers change after a loss; use on_peer_lost='raise', or "
            "DistributedOptimizer without torch.distributed"
        )
    if context is not None and (context.rank, context.size) != (rank, size):
        raise UsageError(
            f"init_process_group: this is rank {rank} of {size}, but sordino.torch.init() has made it rank "
            f"{context.rank} of {context.size}; start both with the same ranks"
        )
    if context is not None:
        meeting = called(store, "meeting", rank, size, timeout_s=_seconds(timeout))
        return Place(context, dist.PrefixStore(f"{meeting.prefix}/group", store))
    _, part = _start_at(store, rank, size, timeout)
    lifecycle.init(store=store, rank=rank, world_size=size)  # finds the start again
    return Place(current(), part, owns=True)


def is_chosen(timeout: timedelta | None) -> bool:
    """Return whether a timeout differs from torch's default, which torch passes if the user gives none."""
    return timeout is not None and timeout != default_pg_timeout


def world_at(store: Any, rank: int, size: int, timeout: timedelta | None) -> tuple[Context, Any]:
    """Return a world of its own for some ranks, and its part of the store at which they meet. Collective."""
    start, part = _start_at(store, rank, size, timeout)
    try:
        return Context(start.world(None, False)), part
    finally:
        forget(start)


def _start_at(store: Any, rank: int, size: int, timeout: timedelta | None) -> tuple[Start, Any]:
    """Return a start at a store, and a part of the store that no other start has. Collective.

    Earlier groups may have used the same store, where their entries remain.
    """
    start = find_start(store=store, rank=rank, world_size=size, timeout_s=_seconds(timeout))
    return start, dist.PrefixStore(f"{prefix_of(start)}/group", store)


def _seconds(timeout: timedelta | None) -> float | None:
    return timeout.total_seconds() if timeout is not None and is_chosen(timeout) else None
