"""SimPy's event loop for many workers: all entries with the same time and priority are one event.

Workers of equal speed stay in step for long, and so do their messages. One SimPy event per message and per step would
take most of a simulation's time and memory.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import simpy
from simpy.events import NORMAL, Event, EventPriority, Timeout


class Late(Timeout):
    """Timeout with a priority among events of the same time. The smallest number comes first; SimPy uses 0 and 1."""

    def __init__(self, clock: Clock, delay: float, priority: int) -> None:
        self.priority = priority
        super().__init__(clock, delay)


class Clock(simpy.Environment):
    """SimPy environment that supports priorities of `Late` and keeps a list of due entries per time and priority."""

    def __init__(self) -> None:
        super().__init__()
        self._due: dict[tuple[float, int], list[Any]] = {}

    def schedule(self, event: Event, priority: EventPriority = NORMAL, delay: float = 0) -> None:
        """Schedule an event as SimPy's environment does."""
        super().schedule(event, EventPriority(event.priority) if isinstance(event, Late) else priority, delay)

    def due(self, delay: float, priority: int, happens: Callable[[list[Any]], None]) -> list[Any]:
        """Return the list of entries that are due after `delay` with this priority, to append to.

        `happens` is called with the list at that time.
        """
        key = self.now + delay, priority
        found = self._due.get(key)
        if found is None:
            found = self._due[key] = []
            event = Late(self, delay, priority)
            assert event.callbacks is not None
            event.callbacks.append(lambda _: happens(self._due.pop(key)))
        return found


@contextmanager
def cycles_are_rare() -> Iterator[None]:
    """Let Python search all objects for reference cycles a hundred times less often within the block.

    There are no cycles, but dozens of objects for each of up to 10^5 workers: the search took a third of the time.
    """
    before = gc.get_threshold()
    gc.set_threshold(*before[:2], 100 * before[2])
    try:
        yield
    finally:
        gc.set_threshold(*before)
