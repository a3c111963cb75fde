"""Clock of deadlines in Python: time in which this process ran.

Time in which it was stopped (Ctrl-Z, a suspended job, a paused container) does not count, as in the core
(csrc/base/awake_clock.h). Linux has no such clock, so whoever waits asks again and again, and a longer time between two
questions is time in which the process did not run.
"""

from __future__ import annotations

import time
from collections.abc import Callable

LONGEST_STEP_S = 0.5


class AwakeClock:
    """Seconds in which this process ran.

    Args:
        longest: seconds between two calls of `now` that count at most; more than the caller sleeps in between.
        clock: which goes on while the process is stopped.
    """

    def __init__(self, longest: float = LONGEST_STEP_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._longest, self._clock = longest, clock
        self._awake, self._last = 0.0, clock()

    def now(self) -> float:
        """Return the seconds since this object was made."""
        now = self._clock()
        self._awake += min(now - self._last, self._longest)
        self._last = now
        return self._awake


class Deadline:
    """Limit of a loop that asks again and again whether it has passed.

    Args:
        seconds: from now on.
        longest: as of `AwakeClock`.
        clock: likewise.
    """

    def __init__(
        self, seconds: float, longest: float = LONGEST_STEP_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._seconds, self._clock = seconds, AwakeClock(longest, clock)

    def left(self) -> float:
        """Return the seconds until it passes, 0 if it has."""
        return max(0.0, self._seconds - self._clock.now())

    def passed(self) -> bool:
        """Return whether it has passed."""
        return self.left() == 0
