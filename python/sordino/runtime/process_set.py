"""Process sets: subsets of the ranks, for collectives among them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sordino._core import Request
from sordino.errors import UsageError
from sordino.runtime import opcode
from sordino.runtime.context import Context, current, current_or_none


class ProcessSet:
    """Some ranks of the world. Register it with `init(process_sets=...)` or `add_process_set` before use.

    Attributes:
        process_set_id: its number; None while it is not registered; 0 for the set of all ranks.
        ranks: its world ranks, sorted; None for a communicator that is not registered.
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

    def __deepcopy__(self, memo: dict[int, Any]) -> ProcessSet:
        """Return the set itself, because a copy of a layer or an optimizer communicates among the same ranks."""
        return self

    def _registered(self) -> int:
        if self.process_set_id is None:
            raise UsageError(f"{self} is not registered; call add_process_set first")
        return self.process_set_id

    def included(self) -> bool | None:
        """Return whether this rank is a member; None for a communicator that is not registered."""
        return None if self.ranks is None else current().rank in self.ranks

    def rank(self) -> int | None:
        """Return this rank's number within the set; None while it is not registered.

        Raises:
            UsageError: this rank is not a member.
        """
        if self.process_set_id is None or self.ranks is None:
            return None
        if not self.included():
            raise UsageError(f"Process is not part of provided process set: {self}")
        return self.ranks.index(current().rank)

    def size(self) -> int | None:
        """Return the number of members; None while it is not registered."""
        return None if self.process_set_id is None or self.ranks is None else len(self.ranks)

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


class _GlobalProcessSet(ProcessSet):
    """All ranks of the current context."""

    def __init__(self) -> None:
        self.mpi_comm = None

    @property
    def ranks(self) -> list[int]:  # type: ignore[override]
        context = current_or_none()
        return [] if context is None else list(range(context.size))


global_process_set: ProcessSet = _GlobalProcessSet()
global_process_set.process_set_id = 0


def unbind_all(context: Context) -> None:
    """Unregister all sets, for `shutdown()`."""
    for process_set in context.process_sets:
        process_set.process_set_id = None
    context.process_sets.clear()


def new_set_id(ranks: Sequence[int]) -> int:
    """Make a process set of these ranks in the core, and return its id. Collective.

    Raises:
        OperationMismatch: `ranks` differs between ranks.
    """
    handle = current().world.run(Request(opcode.ADD_SET, "add_process_set", [], new_set=ranks))
    handle.wait()
    return handle.set_id


def remove_set(identity: int) -> None:
    """Remove the process set with this id from the core. Collective.

    Raises:
        OperationMismatch: `identity` differs between ranks.
        UsageError: an operation on the set is in flight.
    """
    current().world.run(Request(opcode.REMOVE_SET, "remove_process_set", [], removed_set=identity)).wait()


def register_again(context: Context, process_set: ProcessSet) -> None:
    """Register a set again with its remaining members. Collective over all remaining ranks.

    A set without remaining members becomes unregistered.
    """
    if process_set.process_set_id is None:
        return
    now = {identity: rank for rank, identity in enumerate(context.identities)}
    members = context.members_of[id(process_set)]
    process_set.ranks = [now[one] for one in members if one in now]
    if process_set.ranks:
        process_set.process_set_id = new_set_id(process_set.ranks)
    else:
        process_set.process_set_id = None
