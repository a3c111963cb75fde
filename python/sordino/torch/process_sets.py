"""Process sets: collectives among some of the ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sordino import kinds
from sordino.context import Context, current
from sordino.errors import UsageError


class ProcessSet:
    """Some ranks of the world. Register it with `init(process_sets=...)` or `add_process_set` before use.

    Attributes:
        process_set_id: its number, None while it is not registered; 0 is the set of all ranks.
        ranks: its world ranks, sorted.
    """

    process_set_id: int | None = None

    def __init__(self, ranks_or_comm: Iterable[int] | Any) -> None:
        self.mpi_comm = None
        if hasattr(ranks_or_comm, "py2f"):
            self.mpi_comm = ranks_or_comm
            self.ranks: list[int] | None = None
            return
        try:
            self.ranks = sorted(ranks_or_comm)
        except TypeError:
            raise UsageError(
                "ProcessSet expects world ranks or an mpi4py communicator, not " + type(ranks_or_comm).__name__
            ) from None
        if not all(isinstance(rank, int) for rank in self.ranks):
            raise UsageError(f"ProcessSet expects ranks as integers, not {self.ranks!r}")

    def _registered(self) -> int:
        if self.process_set_id is None:
            raise UsageError(f"{self} is not registered; call add_process_set first")
        return self.process_set_id

    def included(self) -> bool | None:
        """Whether this rank is a member (None for a communicator that is not registered)."""
        return None if self.ranks is None else current().rank in self.ranks

    def rank(self) -> int | None:
        """This rank's number within the set; None while it is not registered. UsageError for non-members."""
        if self.process_set_id is None or self.ranks is None:
            return None
        if not self.included():
            raise UsageError(f"Process is not part of provided process set: {self}")
        return self.ranks.index(current().rank)

    def size(self) -> int | None:
        """The number of members; None while it is not registered."""
        return None if self.process_set_id is None or self.ranks is None else len(self.ranks)

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


class _GlobalProcessSet(ProcessSet):
    """All ranks of whichever context is current."""

    def __init__(self) -> None:
        self.mpi_comm = None

    @property
    def ranks(self) -> list[int]:  # type: ignore[override]
        from sordino.context import current_or_none

        context = current_or_none()
        return [] if context is None else list(range(context.size))


global_process_set: ProcessSet = _GlobalProcessSet()
global_process_set.process_set_id = 0


def unbind_all(context: Context) -> None:
    """Called by shutdown(): sets of a world that is gone are not registered any more."""
    for process_set in context.process_sets:
        process_set.process_set_id = None
    context.process_sets.clear()


def _agree(kind: int, name: str, numbers: list[int]) -> list[int]:
    handle = current().world.run(kind, name, [], splits=numbers)
    handle.wait()
    return list(handle.numbers)


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Registers a process set and returns it. Collective: all ranks of the world call it with the same ranks.

    Raises:
        UsageError: ranks that do not exist or repeat, or a set with the same ranks exists.
        OperationMismatch: ranks gave different lists.
    """
    from sordino.torch.surviving import together

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
    identities = [context.world.identities[rank] for rank in ranks]

    def work() -> None:
        now = context.world.identities
        made.ranks = [now.index(one) for one in identities if one in now]
        made.process_set_id = _agree(kinds.ADD_SET, "add_process_set", made.ranks)[0]
        context.process_sets.append(made)
        context.members_of[id(made)] = identities

    def undo() -> None:
        if made in context.process_sets:
            context.process_sets.remove(made)

    together(context, global_process_set, work, undo)
    return made


def register_again(context: Context, process_set: ProcessSet) -> None:
    """Has a set go on with those of its members that are left, in the world of all that are. Collective.

    One that has lost all its members is not registered any more.
    """
    if process_set.process_set_id is None:
        return
    now = {identity: rank for rank, identity in enumerate(context.world.identities)}
    members = context.members_of[id(process_set)]
    process_set.ranks = [now[one] for one in members if one in now]
    if process_set.ranks:
        process_set.process_set_id = _agree(kinds.ADD_SET, "add_process_set", process_set.ranks)[0]
    else:
        process_set.process_set_id = None


def _world_ranks(context: Context, comm: Any) -> list[int]:
    from sordino.torch.functions import allgather_object

    groups: list[tuple[int, ...]] = allgather_object(
        tuple(sorted(comm.allgather(context.rank))) if comm else (), name="process_set_of_communicator"
    )
    mine = [group for group in groups if group]
    if len(set(mine)) != 1:
        raise UsageError("a process set from a communicator needs the same communicator on all its members")
    return list(mine[0])


def remove_process_set(process_set: ProcessSet) -> bool:
    """Forgets a process set. Collective over all ranks. False for one that is unknown, or is that of all ranks."""
    from sordino.torch.surviving import together

    context, identity = current(), process_set.process_set_id
    if identity is None or identity == 0 or identity not in context.world.sets():
        return False

    def work() -> None:
        if process_set.process_set_id is not None:  # it may have lost all its members
            _agree(kinds.REMOVE_SET, "remove_process_set", [process_set.process_set_id])
        process_set.process_set_id = None

    def undo() -> None:
        process_set.process_set_id = identity

    together(context, global_process_set, work, undo)
    return True
