"""Names of parameters: those that wrappers change, and those of parameters without a name."""

from __future__ import annotations

import re
from collections.abc import Mapping
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


def by_plain_names(saved: Mapping[str, T]) -> dict[str, T]:
    """Return saved values of parameters by names without wrappers, for `without_wrappers` of a present name."""
    return {without_wrappers(name): value for name, value in saved.items()}


def may_be_one(name: str, other: str) -> bool:
    """Return whether two names may belong to the same parameter: only one is a place, or only wrappers differ."""
    if bool(_NAMELESS.fullmatch(name)) != bool(_NAMELESS.fullmatch(other)):
        return True
    return without_wrappers(name) == without_wrappers(other)
