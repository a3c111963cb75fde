"""Process sets that scripts add and remove. All ranks register and remove them together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sordino.errors import UsageError
from sordino.runtime.collectives.objects import allgather_object
from sordino.runtime.context import Context, current
from sordino.runtime.process_set import ProcessSet, global_process_set, new_set_id, remove_set
from sordino.runtime.recovery.losses import together

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Register a process set and return it. Collective: all ranks of the world call it with the same ranks.

    Raises:
        UsageError: a rank does not exist or is listed twice, or a set with the same ranks exists.
        OperationMismatch: ranks gave different lists.
    """
    context = current()
    made = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if made.process_set_id is not None:
        raise UsageError(f"{made} is registered already")
    if made.mpi_comm is not None:
        made.ranks = _world_ranks(context, made.mpi_comm)
    ranks = made.ranks or list(range(context.size))
    if len(set(ranks)) != len(ranks) or not all(0 <= rank < context.size for rank in ranks):
        raise UsageError(f"a process set needs different ranks from 0 to {context.size - 1}, not {ranks}")
    known = [other.ranks for other in context.process_sets if other.process_set_id is not None]
    if ranks in [list(range(context.size)), *known]:
        raise UsageError(f"Attempted to add a duplicate process set: one with ranks {ranks} exists")
    identities = [context.identities[rank] for rank in ranks]

    def work() -> None:
        now = context.identities
        made.ranks = [now.index(one) for one in identities if one in now]
        made.process_set_id = new_set_id(made.ranks)
        if made not in context.process_sets:  # a set that was removed and added again keeps its place
            context.process_sets.append(made)
        context.members_of[id(made)] = identities

    def undo() -> None:
        made.process_set_id = None

    together(context, global_process_set, work, undo)
    return made


def _world_ranks(context: Context, comm: Any) -> list[int]:
    groups: list[tuple[int, ...]] = allgather_object(
        tuple(sorted(comm.allgather(context.rank))) if comm else (), name="process_set_of_communicator"
    )
    mine = [group for group in groups if group]
    if len(set(mine)) != 1:
        raise UsageError("a process set from a communicator needs the same communicator on all its ranks")
    return list(mine[0])


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set. Collective over all ranks.

    Returns:
        False if it is unknown, or the set of all ranks, which cannot be removed.
    """
    context, identity = current(), process_set.process_set_id
    if identity is None or identity == 0 or identity not in context.world.sets():
        return False

    def work() -> None:
        if process_set.process_set_id is not None:  # after a loss it may have no members left, and no id
            remove_set(process_set.process_set_id)
        process_set.process_set_id = None

    def undo() -> None:
        process_set.process_set_id = identity

    together(context, global_process_set, work, undo)
    return True
