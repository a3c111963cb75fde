"""Fingerprints: the settings that ranks must have in common.

Ranks exchange their fingerprints. If these differ, all ranks raise the same error.

A fingerprint maps the name of a setting to a phrase with its value:
{"op": "op=Sum", "Sordino": "Sordino 0.1.0"}.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from sordino.errors import ConfigurationMismatch, TransportError

Fingerprint = Mapping[str, str]
_LONGEST = 160  # maximum number of characters of a phrase in an error


def encode(fingerprint: Fingerprint) -> str:
    """Return a fingerprint as text."""
    return json.dumps(fingerprint)


def decode(text: str, rank: int) -> Fingerprint:
    """Return the fingerprint in a text. Raises TransportError if the text is not a fingerprint."""
    try:
        fingerprint = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        fingerprint = None
    if not isinstance(fingerprint, dict) or not all(isinstance(phrase, str) for phrase in fingerprint.values()):
        raise TransportError(
            f"rank {rank} sent {text[:80]!r} instead of its settings. Install the same version of Sordino on all hosts"
        )
    return fingerprint


def rank_list(ranks: Sequence[int]) -> str:
    """Return 'rank 3', or 'ranks 0, 2, 5-9'."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    pieces = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(pieces)}"


def by_value(ranks: Sequence[int], values: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Return the ranks that have each value, in the order of the ranks."""
    return {
        value: tuple(rank for rank, other in zip(ranks, values) if other == value) for value in dict.fromkeys(values)
    }


def who_has_what(ranks: Sequence[int], values: Sequence[str]) -> str:
    """Return 'rank 0 has A, ranks 1-3 have B'."""
    parts = []
    for value, owners in by_value(ranks, values).items():
        shown = value if len(value) <= _LONGEST else value[:_LONGEST] + "…"
        parts.append(f"{rank_list(owners)} {'has' if len(owners) == 1 else 'have'} {shown}")
    return ", ".join(parts)


def compare(ranks: Sequence[int], fingerprints: Sequence[Fingerprint]) -> None:
    """Raise ConfigurationMismatch with all differences, if the fingerprints of these ranks differ."""
    names = dict.fromkeys(name for fingerprint in fingerprints for name in fingerprint)
    found = {name: [fingerprint.get(name, f"no {name}") for fingerprint in fingerprints] for name in names}
    different = {name: phrases for name, phrases in found.items() if len(set(phrases)) > 1}
    common = {name: phrases for name, phrases in different.items() if all(name in one for one in fingerprints)}
    different = common or different  # settings of only some ranks follow from a difference in common ones
    if different:
        text = "; ".join(who_has_what(ranks, phrases) for phrases in different.values())
        settings = {name: by_value(ranks, phrases) for name, phrases in different.items()}
        raise ConfigurationMismatch(f"ranks have different settings: {text}", settings)
