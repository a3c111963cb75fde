"""What ranks must have in common, on a card that each shows the others: where cards differ, everybody says so alike.

A card maps what a setting is called to a phrase that says which it is: {"op": "op=Sum", "Sordino": "Sordino 0.1.0"}.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from sordino.errors import ConfigurationMismatch, TransportError

Card = Mapping[str, str]
_LONGEST = 160  # characters of a phrase that an error shows


def encode(card: Card) -> str:
    """A card as text."""
    return json.dumps(card)


def decode(text: str, rank: int) -> Card:
    """A card from text. TransportError if it is none."""
    try:
        card = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        card = None
    if not isinstance(card, dict) or not all(isinstance(phrase, str) for phrase in card.values()):
        raise TransportError(f"rank {rank} says {text[:80]!r} of itself: is the same Sordino installed everywhere?")
    return card


def rank_list(ranks: Sequence[int]) -> str:
    """'rank 3', or 'ranks 0, 2, 5-9'."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    pieces = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(pieces)}"


def by_value(ranks: Sequence[int], values: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Which ranks have which value, in the order of the ranks."""
    return {
        value: tuple(rank for rank, other in zip(ranks, values) if other == value) for value in dict.fromkeys(values)
    }


def who_has_what(ranks: Sequence[int], values: Sequence[str]) -> str:
    """'rank 0 has A, ranks 1-3 have B'."""
    parts = []
    for value, owners in by_value(ranks, values).items():
        shown = value if len(value) <= _LONGEST else value[:_LONGEST] + "…"
        parts.append(f"{rank_list(owners)} {'has' if len(owners) == 1 else 'have'} {shown}")
    return ", ".join(parts)


def compare(ranks: Sequence[int], cards: Sequence[Card]) -> None:
    """ConfigurationMismatch if the cards of these ranks differ, with all that differs."""
    names = dict.fromkeys(name for card in cards for name in card)
    found = {name: [card.get(name, f"no {name}") for card in cards] for name in names}
    different = {name: phrases for name, phrases in found.items() if len(set(phrases)) > 1}
    common = {name: phrases for name, phrases in different.items() if all(name in card for card in cards)}
    different = common or different  # what only some have, they have because of what they differ in
    if different:
        text = "; ".join(who_has_what(ranks, phrases) for phrases in different.values())
        settings = {name: by_value(ranks, phrases) for name, phrases in different.items()}
        raise ConfigurationMismatch(f"ranks are set up differently: {text}", settings)
