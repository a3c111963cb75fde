"""Actions that the state machine of a worker can request.

The state machine has neither clock nor network. So a simulation and real ranks run the same state machine, and execute
the actions that it returns.
"""

from __future__ import annotations

from typing import NamedTuple

Message = tuple[str | float, ...]
"""A word followed by numbers."""


class Tell(NamedTuple):
    """Send a message to a rank, possibly to the sender itself."""

    to: int
    message: Message


class Wake(NamedTuple):
    """Call `alarm` at this time, in seconds. Replaces the time of the last `Wake`."""

    at: float


class Skip(NamedTuple):
    """Skip this exchange, because no partner is available."""


class Warn(NamedTuple):
    """Log a warning for the user."""

    text: str
