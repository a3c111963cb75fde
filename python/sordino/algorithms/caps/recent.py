"""Cache of values that are expensive to make, for the keys used last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Recent(Generic[Value]):
    """Cache with the values of the `size` keys used last.

    functools.lru_cache is not used because it would keep the object alive whose method makes the values.
    """

    def __init__(self, size: int = 16) -> None:
        self._size = size
        self._values: OrderedDict[bytes, Value] = OrderedDict()

    def get(self, key: bytes, make: Callable[[bytes], Value]) -> Value:
        """Return the value of a key. It is made by `make(key)` unless it is cached."""
        if key not in self._values:
            self._values[key] = make(key)
            if len(self._values) > self._size:
                self._values.popitem(last=False)
        self._values.move_to_end(key)
        return self._values[key]
