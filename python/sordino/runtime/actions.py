"""What a machine that decides for a worker may ask for.

It knows neither clock nor network, so a simulation and real ranks run the very same one, and carry out what it says.
"""

from __future__ import annotations

from typing import NamedTuple

Message = tuple[str | float, ...]
"""A word, and numbers."""


class Tell(NamedTuple):
    """Send a message to a rank; maybe to oneself."""

    to: int
    message: Message


class Wake(NamedTuple):
    """Call `alarm` at that time, and not at the one said before."""

    at: float


class Skip(NamedTuple):
    """There is nobody to meet this time."""


class Warn(NamedTuple):
    """Tell the user."""

    text: str
