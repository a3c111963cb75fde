"""Clock for deadlines in Python. It counts the time in which this process ran.

Time in which the process was stopped (Ctrl-Z, a suspended job, a paused container) does not count, as in the core
(csrc/base/awake_clock.h). Linux has no such clock. So a waiting loop asks repeatedly, and a long time between two calls
is taken as time in which the process did not run.
"""

from __future__ import annotations

import time
from collections.abc import Callable

LONGEST_STEP_S = 0.5


class AwakeClock:
    """Seconds in which this process ran.

    Args:
        longest: maximum of seconds that count between two calls of `now`. It must exceed the caller's sleep.
        clock: the underlying clock in seconds, which also runs while the process is stopped.
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
    """Deadline for a polling loop.

    Args:
        seconds: time until the deadline, counted from construction.
        longest: see `AwakeClock`.
        clock: see `AwakeClock`.
    """

    def __init__(
        self, seconds: float, longest: float = LONGEST_STEP_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._seconds, self._clock = seconds, AwakeClock(longest, clock)

    def left(self) -> float:
        """Return the seconds until the deadline, 0 if it has passed."""
        return max(0.0, self._seconds - self._clock.now())

    def passed(self) -> bool:
        """Return whether the deadline has passed."""
        return self.left() == 0
