"""What somebody may have meant who has misspelt a name: the known one that is nearest to it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

_LAUNCHERS = ("RANK", "SIZE", "TOKEN", "RENDEZVOUS", "LAUNCHER", "RESTART", "ON_PEER_LOST", "RECORD", "RANK_VARIABLES")
_NEAR = 0.85  # for variables, of which others may have some of their own


def meant(word: str, known: Iterable[str], least: float = 0.6) -> str:
    """Return `; did you mean X?` for the known word that is nearest, or nothing if none is near.

    Args:
        word: as it was written.
        known: what it could have been.
        least: how alike they must be, up to 1 (`difflib.get_close_matches`).
    """
    found = difflib.get_close_matches(word, list(known), 1, least)
    return f"; did you mean {found[0]}?" if found else ""


def misspelt_variables(environment: Mapping[str, str], known: Iterable[str]) -> list[str]:
    """Return a line for each variable that nobody reads, and that is nearly one of those that are read.

    Args:
        environment: this process's.
        known: the variables that the core reads.
    """
    names = [*known, *(f"SORDINO_{name}" for name in _LAUNCHERS)]
    strange = sorted(name for name in environment if name.startswith("SORDINO_") and name not in names)
    return [f"{name} is no variable of Sordino{near}" for name in strange if (near := meant(name, names, _NEAR))]
