"""Values that cost something to make, kept for the last few keys that they were made for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Recent(Generic[Value]):
    """The values of the `size` keys that were asked for last.

    (functools.lru_cache would keep alive who makes them.)
    """

    def __init__(self, size: int = 16) -> None:
        self._size = size
        self._values: OrderedDict[bytes, Value] = OrderedDict()

    def get(self, key: bytes, make: Callable[[bytes], Value]) -> Value:
        """Return the value of a key, made unless it is known."""
        if key not in self._values:
            self._values[key] = make(key)
            if len(self._values) > self._size:
                self._values.popitem(last=False)
        self._values.move_to_end(key)
        return self._values[key]
