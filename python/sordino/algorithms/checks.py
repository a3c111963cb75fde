"""Checks of settings, and constants that several algorithms share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Literal

from sordino.errors import UsageError

Buffers = Literal["local", "average"]

NO_BUFFERS = "simulated models have no buffers"


def require(condition: bool, owner: object, field: str, must: str) -> None:
    """Raise UsageError unless the condition holds, naming the owner's field and its value."""
    if not condition:
        raise UsageError(f"{type(owner).__name__}({field}={getattr(owner, field)!r}): {must}")


def is_count(value: object, least: int) -> bool:
    """Return whether a value is an integer (not a bool) and at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


_KINDS = {"int": "an integer within 64 bits", "float": "a number", "bool": "True or False", "None": "None"}


def check_kinds(owner: type, settings: Mapping[str, object]) -> None:
    """Raise UsageError for a value whose type is not the int, float, bool or None that the dataclass declares.

    The class itself must check settings that are declared as anything else.
    """
    declared = {one.name: getattr(one.type, "__name__", str(one.type)).split(" | ") for one in fields(owner)}
    for name, value in settings.items():
        kinds = declared.get(name, [])
        if kinds and set(kinds) <= _KINDS.keys() and not any(_is_of(value, kind) for kind in kinds):
            expected = " or ".join(_KINDS[kind] for kind in kinds)
            raise UsageError(f"{owner.__name__}({name}={value!r}): must be {expected}")


def _is_of(value: object, kind: str) -> bool:
    if value is None or isinstance(value, bool):
        return kind == ("None" if value is None else "bool")
    if isinstance(value, int):
        return kind in ("int", "float") and abs(value) < 1 << 64
    return kind == "float" and isinstance(value, float)
