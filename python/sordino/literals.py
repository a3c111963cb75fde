"""Python expressions in text that users write, such as settings.

CPython 3.11 counts the depth of the syntax trees of all threads together, and raises SystemError if two threads make
one at the same time (its issue 106905). So here one thread at a time does.
"""

from __future__ import annotations

import ast
import threading
from typing import Any

_lock = threading.RLock()  # the garbage collector may run code of the same thread meanwhile


def expression(text: str) -> ast.expr:
    """Return the syntax tree of an expression. Raises whatever `ast.parse` raises."""
    with _lock:
        return ast.parse(text.lstrip(" \t"), mode="eval").body


def literal(text: str) -> Any:
    """Return the value of a literal. Raises whatever `ast.literal_eval` raises."""
    return ast.literal_eval(expression(text))
