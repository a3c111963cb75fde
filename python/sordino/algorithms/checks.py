"""Checks of settings, and constants that several algorithms share."""

from __future__ import annotations

from typing import Literal

from sordino.errors import UsageError

Buffers = Literal["local", "average"]

NO_BUFFERS = "the models that are simulated have no buffers"


def require(condition: bool, owner: object, field: str, must: str) -> None:
    """Raise UsageError unless the condition holds, naming the owner's field and its value."""
    if not condition:
        raise UsageError(f"{type(owner).__name__}({field}={getattr(owner, field)!r}): {must}")


def is_count(value: object, least: int) -> bool:
    """Return whether a value is an integer (not a bool) and at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
