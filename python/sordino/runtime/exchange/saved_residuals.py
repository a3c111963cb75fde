"""Residuals of a state: the pieces of parameters that they belong to, and their values (residuals.py)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from sordino.errors import UsageError

BY_RANK = "by_rank"
"""Key of a dict whose values belong to one rank each, by the rank's number."""
WAS = "was"
"""Key of the number under which a rank has saved its values, if its number has changed since."""


class Piece(NamedTuple):
    """Part of a parameter in the values of a mean.

    Attributes:
        name: the name of the parameter.
        begin, end: range of elements of the parameter.
        at: position of the first of them in the values.
        whole: number of elements of the parameter.
    """

    name: str
    begin: int
    end: int
    at: int
    whole: int


class Saved:
    """Residuals of one mean in a loaded state, which no mean has taken yet.

    Attributes:
        pieces: the parameters in the values of the mean.
        residuals: the residuals; if `moved`, one tensor that includes the residual of the shard.
        moved: whether they must be added to the residuals of a mean; False: they can replace them.
    """

    def __init__(self, pieces: Sequence[Piece], residuals: Sequence[torch.Tensor]) -> None:
        self.pieces, self.residuals, self.moved = list(pieces), list(residuals), False

    def move(self, place: int, ranks: int, scale: float) -> None:
        """Add the residual of the shard to the residual of all values, and drop the residuals of padding.

        Args:
            place: position of the rank that has saved the residuals, among the ranks of its mean.
            ranks: number of these ranks.
            scale: factor of the result.
        """
        owed, *of_shard = self.residuals
        owed = owed.clone()
        for shard in of_shard:
            part = owed[place * len(shard) : (place + 1) * len(shard)]
            part.add_(shard[: len(part)], alpha=ranks)
        self.residuals, self.moved = [torch.zeros_like(owed)], True
        for piece in self.pieces:
            self.part(piece, piece.begin, piece.end).copy_(owed[piece.at : piece.at + piece.end - piece.begin])
        self.residuals[0].mul_(scale)

    def part(self, piece: Piece, begin: int, end: int) -> torch.Tensor:
        """Return the moved residuals of a range of elements of a parameter, as a view."""
        return self.residuals[0][piece.at + begin - piece.begin : piece.at + end - piece.begin]


def with_own(state: Any, own: Any, rank: int) -> Any:
    """Return a copy of a state, with the values under "by_rank" from another state.

    Args:
        state: a state with dicts, such as another rank's.
        own: the state of one rank, with its values at the same keys. Keys that it lacks get no values.
        rank: the number of that rank now. Its values say under which number it has saved them (`WAS`).
    """
    if not isinstance(state, dict):
        return state
    mine = own if isinstance(own, dict) else {}
    found = type(state)()
    for key, value in state.items():
        if key == BY_RANK:
            values = mine.get(key, {})
            # A state of several ranks, which has been loaded and not used yet, stays as it is.
            found[key] = values
            if len(values) == 1:
                ((number, entry),) = values.items()
                found[key] = {rank: {WAS: number, **entry}}
        else:
            found[key] = with_own(value, mine.get(key), rank)
    return found


def renumbered(state: Any, before: int, now: int) -> Any:
    """Return a state of this rank, whose number was `before`, with its residuals under the number `now`.

    Args:
        state: a state with dicts. It may be a loaded one that is not in use yet. Residuals of other ranks in it stay.
        before: the number of this rank when the residuals were computed.
        now: its present number.
    """
    if before == now or not isinstance(state, dict):
        return state
    found = type(state)()
    for key, value in state.items():
        if key == BY_RANK and list(value) == [before]:
            found[key] = {now: {WAS: before, **value[before]}}
        else:
            found[key] = renumbered(value, before, now)
    return found


def drop(state: Mapping[str, Any], what: str, why: str) -> None:
    """Warn that the residuals of a state are dropped, unless the state has no residuals.

    Args:
        state: the state.
        what: name of the values that are sent.
        why: reason.
    """
    if state:
        warnings.warn(
            f"{what}: residuals of error feedback in the state are dropped, because {why}. Values that were "
            "not sent yet are never sent",
            RuntimeWarning,
            stacklevel=2,
        )


def checked(state: Mapping[str, Any], what: str) -> Mapping[int, Mapping[str, Any]]:
    """Return the residuals of a state, by rank. Raises UsageError if it has another form."""
    entries: Mapping[int, Mapping[str, Any]] = state.get(BY_RANK, {} if not state else None)
    try:
        fits = all(_is_entry(rank, entry) for rank, entry in entries.items())
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        fits = False
    if not fits:
        raise UsageError(
            f"{what}: these are no residuals of error feedback. Load what state_dict() has returned, or remove them "
            "from the state to start from 0"
        )
    return entries


def _is_entry(rank: object, entry: Mapping[str, Any]) -> bool:
    """Return whether a value has the form of the residuals of a rank. Other values may raise errors."""
    for mean in entry["means"]:
        pieces = [Piece(*piece) for piece in mean["pieces"]]
        count = max((piece.at + piece.end - piece.begin for piece in pieces), default=0)
        if count > mean["residuals"][0].numel():
            return False
    counts = entry["size"], entry.get("workers", 1)
    return isinstance(rank, int) and entry.get(WAS, rank) in entry["ranks"] and all(isinstance(n, int) for n in counts)
