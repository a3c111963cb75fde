"""Decisions before ranks meet: whether some ranks have no model, and whether ranks continue after a loss."""

from __future__ import annotations

from sordino import _core
from sordino.algorithms import Algorithm, resolve
from sordino.errors import UsageError

INSTEAD = 'use on_peer_lost="raise", and start the job with `sordino run --restarts N` to continue from checkpoints'


def helped(algorithm: Algorithm | str | None) -> Algorithm | None:
    """Return the algorithm if it gives some ranks no model, else None. Raises UsageError if it is unknown."""
    chosen = resolve(algorithm)
    return chosen if chosen.dedicated else None


def survives_losses(on_peer_lost: str | None, algorithm: Algorithm | str | None) -> bool:
    """Return whether ranks continue after a loss, by the argument of `init`, or else by the environment.

    Raises:
        UsageError: the value is neither "raise" nor "continue", or some ranks have no model and the value is
            "continue".
    """
    if on_peer_lost not in (None, "raise", "continue"):
        raise UsageError(f"on_peer_lost={on_peer_lost!r}: must be 'raise' or 'continue'")
    wanted = _core.survives_losses() if on_peer_lost is None else on_peer_lost == "continue"
    if wanted and helped(algorithm) is not None:
        raise UsageError(f"on_peer_lost='continue' cannot be combined with ranks that have no model; {INSTEAD}")
    return wanted
