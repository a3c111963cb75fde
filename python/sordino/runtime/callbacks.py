"""Callbacks at the events of a world, which do not keep their owners alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field


class WeakMethods:
    """Methods of objects, at most one per object. A method of an object that no longer exists is not called."""

    def __init__(self) -> None:
        self._methods: dict[int, weakref.WeakMethod[Callable[[], None]]] = {}

    def add(self, method: Callable[[], None]) -> None:
        """Add a bound method. It replaces the object's earlier one."""
        owner = id(method.__self__)  # type: ignore[attr-defined]
        if owner in self._methods and self._methods[owner]() is None:
            del self._methods[owner]  # of a former object with the same id; this one comes last in the order
        self._methods[owner] = weakref.WeakMethod(method)

    def discard(self, owner: object) -> None:
        """Remove the method of an object, if there is one."""
        self._methods.pop(id(owner), None)

    def __bool__(self) -> bool:
        """Return whether there are methods, including those of objects that no longer exist."""
        return bool(self._methods)

    def living(self) -> list[Callable[[], None]]:
        """Return the methods of the objects that still exist, in the order in which they were added."""
        return [method for one in self._methods.values() if (method := one()) is not None]


@dataclass
class Callbacks:
    """Callbacks of one rank.

    Attributes:
        on_join: agreements in which this rank must take part before it joins, because other ranks need them later.
        while_joined: take part in work of other ranks from this rank's join until all have joined.
        on_shutdown: complete postponed work; called before this rank leaves.
        on_end: release the user's parameters; called after this rank has left.
    """

    on_join: WeakMethods = field(default_factory=WeakMethods)
    while_joined: WeakMethods = field(default_factory=WeakMethods)
    on_shutdown: WeakMethods = field(default_factory=WeakMethods)
    on_end: WeakMethods = field(default_factory=WeakMethods)
