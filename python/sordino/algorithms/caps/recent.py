"""Cache of expensive values for the most recently used keys."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Recent(Generic[Value]):
    """Cache of the values of the `size` most recently used keys.

    functools.lru_cache is not used, because it would keep alive the object whose method makes the values.
    """

    def __init__(self, size: int = 16) -> None:
        self._size = size
        self._values: OrderedDict[bytes, Value] = OrderedDict()

    def get(self, key: bytes, make: Callable[[bytes], Value]) -> Value:
        """Return the value of a key: the cached one, or else `make(key)`, which is then cached."""
        if key not in self._values:
            self._values[key] = make(key)
            if len(self._values) > self._size:
                self._values.popitem(last=False)
        self._values.move_to_end(key)
        return self._values[key]
