"""Suggestions for misspelt names: the most similar known name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

_LAUNCHERS = (
    "RANK", "SIZE", "TOKEN", "RENDEZVOUS", "LAUNCHER", "RESTART", "ON_PEER_LOST", "RECORD", "RANK_VARIABLES",
    "MIN_RANKS", "NEWCOMER",
)  # fmt: skip
_NEAR = 0.85  # least similarity of variables; high, because other programs may have variables with this prefix


def meant(word: str, known: Iterable[str], least: float = 0.6) -> str:
    """Return `; did you mean X?` for the most similar known word, or "" if no word is similar enough.

    Args:
        word: the word as written.
        known: the valid words.
        least: least similarity, 0 to 1 (`cutoff` of `difflib.get_close_matches`).
    """
    found = difflib.get_close_matches(word, list(known), 1, least)
    return f"; did you mean {found[0]}?" if found else ""


def misspelt_variables(environment: Mapping[str, str], known: Iterable[str]) -> list[str]:
    """Return a line for each unknown variable SORDINO_... whose name is similar to a known one.

    Args:
        environment: environment of this process.
        known: the variables that the core reads.
    """
    names = [*known, *(f"SORDINO_{name}" for name in _LAUNCHERS)]
    strange = sorted(name for name in environment if name.startswith("SORDINO_") and name not in names)
    return [f"{name} is not a variable of Sordino{near}" for name in strange if (near := meant(name, names, _NEAR))]
