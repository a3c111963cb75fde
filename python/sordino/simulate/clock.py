"""SimPy's event loop for many workers: what is due at one time is one event.

Workers of the same speed keep step for long, and so do their messages; an event of SimPy's for each message and each
worker's step would take most of a simulation's time and memory.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import simpy
from simpy.events import NORMAL, Event, EventPriority, Timeout


class Late(Timeout):
    """A timeout with a priority among events of the same time; the smallest is first, SimPy's are 0 and 1."""

    def __init__(self, clock: Clock, delay: float, priority: int) -> None:
        self.priority = priority
        super().__init__(clock, delay)


class Clock(simpy.Environment):
    """SimPy's, which knows that of equal times some come later, and keeps lists of what is due."""

    def __init__(self) -> None:
        super().__init__()
        self._due: dict[tuple[float, int], list[Any]] = {}

    def schedule(self, event: Event, priority: EventPriority = NORMAL, delay: float = 0) -> None:
        """Schedule an event as SimPy's environment does."""
        super().schedule(event, EventPriority(event.priority) if isinstance(event, Late) else priority, delay)

    def due(self, delay: float, priority: int, happens: Callable[[list[Any]], None]) -> list[Any]:
        """Return the list of what is due then with that priority, to append to; `happens` is called with it."""
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
    """Have Python look through all objects for cycles a hundred times more seldom.

    There are none, but there are dozens of objects for each of up to 10^5 workers: it took a third of the time.
    """
    before = gc.get_threshold()
    gc.set_threshold(*before[:2], 100 * before[2])
    try:
        yield
    finally:
        gc.set_threshold(*before)
