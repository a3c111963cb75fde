"""Names by which ranks match operations and shared objects."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class Names:
    """Names of one rank. The n-th call with the same arguments returns the same name on all ranks.

    Args:
        process_sets: the sets that the user has registered, in order. They keep their place in this list after a loss.
    """

    def __init__(self, process_sets: Sequence[Any]) -> None:
        self.epoch = 0
        self._process_sets = process_sets
        self._operations: Counter[tuple[str, str]] = Counter()
        self._plans: Counter[tuple[str, str]] = Counter()
        self._prefix = ""
        self._joins = 0
        self._counting = threading.Lock()

    def operation(self, label: str, name: str | None, process_set: int) -> str:
        """Return the name by which ranks match an operation.

        Unnamed operations are counted by kind and process set, so the counts of ranks outside of a set agree, too.
        """
        if name is None:
            return f"{label}.noname.{self._joins}.{self._next(self._operations, process_set, label)}"
        return f"{label}.{name}"

    def plan(self, key: str, process_set: int | None) -> str:
        """Return a new name with this key: the n-th call in a process set returns the same name on all its members."""
        return f"{self._prefix}{key}.{self._next(self._plans, process_set or 0, key)}"

    def lasting(self, key: str, process_set: Any) -> str:
        """Return a name for a process set's object that stays the same after losses."""
        return f"{self._of_set(process_set.process_set_id or 0)}.{key}"

    def joined(self) -> None:
        """Note that all ranks have joined. Resets the counts of unnamed operations, which may differ between ranks."""
        self._joins += 1
        self._operations.clear()

    def begin_anew(self) -> None:
        """Start all counts anew, because ranks have joined that have counted nothing.

        For a new world, in which no name is in use.
        """
        self._plans, self._operations, self._joins = Counter(), Counter(), 0

    @contextmanager
    def of_epoch(self) -> Iterator[None]:
        """Within the block, count plans and operations from 0, and begin the names of plans with the epoch.

        The remaining ranks may be at different places in their programs, so their counters may differ.
        """
        before = self._plans, self._operations, self._prefix
        self._plans, self._operations, self._prefix = Counter(), Counter(), f"epoch {self.epoch}."
        try:
            yield
        finally:
            self._plans, self._operations, self._prefix = before

    def until_now(self) -> Callable[[], None]:
        """Return a function that resets the counters to their present values, for work that is repeated."""
        plans, operations = self._plans.copy(), self._operations.copy()

        def go_back() -> None:
            self._plans, self._operations = plans.copy(), operations.copy()

        return go_back

    def _next(self, counter: Counter[tuple[str, str]], process_set: int, key: str) -> int:
        with self._counting:  # backward names and starts operations on another thread
            place = (self._of_set(process_set), key)
            counter[place] += 1
            return counter[place] - 1

    def _of_set(self, process_set: int) -> str:
        """Return the key of a process set in counters.

        The set of all ranks and sets of users keep their key in the next world; other sets do not.
        """
        if process_set == 0:
            return "all"
        for place, known in enumerate(self._process_sets):
            if known.process_set_id == process_set:
                return f"user's {place}"
        return f"{self.epoch}.{process_set}"
