"""Operations that a rank has started but not waited for yet, and the names that they reserve."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sordino._core import Handle


@dataclass
class Pending:
    """An operation that `synchronize()` can wait for."""

    handle: Handle
    finish: Callable[[Handle], Any]
    epoch: int  # of the context at the start
    name: tuple[int, str]  # process set and name, reserved until the operation has been waited for


class PendingOperations:
    """The operations of a context by their tickets, which are the handles that users get.

    All contexts of a process share one count of tickets. So a handle from before `shutdown()` is invalid after the next
    `init()`.

    Attributes:
        taken: tickets of operations by their reserved names, until `poll` or `synchronize` has seen their end.
    """

    _counting = threading.Lock()
    _newest_ticket = 0

    def __init__(self) -> None:
        self.taken: dict[tuple[int, str], int] = {}
        self._operations: dict[int, Pending] = {}
        with self._counting:
            self._tickets_before = self._last_ticket = PendingOperations._newest_ticket

    def add(self, operation: Pending) -> int:
        """Add an operation and return its ticket, for `poll` and `synchronize`."""
        with self._counting:
            PendingOperations._newest_ticket += 1
            ticket = self._last_ticket = PendingOperations._newest_ticket
        self._operations[ticket] = operation
        self.taken[operation.name] = ticket
        return ticket

    def find(self, ticket: object) -> Pending | None:
        """Return the operation with this ticket; None for an unknown ticket, or if it has been waited for."""
        return self._operations.get(ticket) if isinstance(ticket, int) and self.has_given(ticket) else None

    def remove(self, ticket: int) -> Pending | None:
        """Remove and return the operation with this ticket; None if another thread has removed it."""
        return self._operations.pop(ticket, None)

    def put_back(self, ticket: int, operation: Pending) -> None:
        """Add an operation again whose wait was interrupted, so that its handle stays valid. Its name stays free."""
        self._operations[ticket] = operation

    def free_name(self, ticket: int, name: tuple[int, str]) -> None:
        """Release the name of an operation that has ended, unless another operation has it already."""
        if self.taken.get(name) == ticket:
            del self.taken[name]

    def free_all_names(self) -> None:
        """Release all names, because the world of their operations has ended.

        Handles stay valid. A script that an error has interrupted may have lost them, and start its operations again.
        """
        self.taken.clear()  # not replaced, because the core has a reference to this dict

    def has_given(self, ticket: object) -> bool:
        """Return whether `add` has ever returned this number, or has returned an earlier and a later one."""
        return type(ticket) is int and self._tickets_before < ticket <= self._last_ticket
