"""Names of parameters: names changed by wrappers, and names for nameless parameters."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TypeVar

T = TypeVar("T")

_WRAPPERS = {"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_NAMELESS = re.compile(r"group\d+\.parameter\d+")


def nameless(group: int, number: int) -> str:
    """Return the name of a parameter without a name: its place in the optimizer's groups."""
    return f"group{group}.parameter{number}"


def without_wrappers(name: str) -> str:
    """Return a name without the parts that torch.compile, DistributedDataParallel and others insert."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def finder(saved: Mapping[str, T]) -> Callable[[str], T | None]:
    """Return a function that returns the saved value of a parameter by its present name, or None.

    It is the value saved under this name, or else the only value whose name differs just by wrappers.
    """
    plain: dict[str, list[T]] = {}
    for name, value in saved.items():
        plain.setdefault(without_wrappers(name), []).append(value)

    def find(name: str) -> T | None:
        if name in saved:
            return saved[name]
        alike = plain.get(without_wrappers(name), [])
        return alike[0] if len(alike) == 1 else None

    return find


def may_be_one(name: str, other: str) -> bool:
    """Return whether two names may belong to one parameter: one of them is from `nameless`, or only wrappers differ."""
    if bool(_NAMELESS.fullmatch(name)) != bool(_NAMELESS.fullmatch(other)):
        return True
    return without_wrappers(name) == without_wrappers(other)
