"""Restarts of a failed job. Its ranks continue from their last checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable

from sordino.launcher.descriptors import say
from sordino.launcher.outcomes import signal_name, signal_of
from sordino.launcher.processes import Ended, StopSignals

# Importing torch and meeting over MPI takes seconds, so a job that ended within this time has not trained. It would
# probably fail again, so the next start waits until the cause may have passed.
AT_ONCE_S = 10.0
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 60.0


def repeat(start: Callable[[int, StopSignals], Ended], restarts: int, stop: StopSignals) -> int:
    """Start a job, restart it after failures, and return the status of the last start. Prints each failure on stderr.

    Args:
        start: called with the number of the start, from 0.
        restarts: maximum number of restarts.
        stop: signals after which the job is not restarted.
    """
    wait = 0.0
    for number in range(restarts + 1):
        begun = time.monotonic()
        ended = start(number, stop)
        if ended.status == 0 or ended.stopped or not restarts:
            return ended.status
        lived = time.monotonic() - begun
        what = f"the job failed after {lived:.0f} s with status {ended.status}"
        if ended.killed:
            what += f", because mpirun was ended by {signal_name(ended.status - 128)}"
        elif by := signal_of(ended.status):
            what += f", which is {signal_name(by)}"
        if number == restarts:
            say(f"{what}; it has been restarted {_times(restarts)}, which is the limit")
            break
        wait = next_wait(wait, lived)
        say(f"{what}; restart {number + 1} of {restarts}" + (f" in {wait:.0f} s" if wait else ""))
        stop.sleep(wait)
        if stop.received:
            return 128 + stop.received[0]
    return ended.status


def next_wait(wait: float, lived: float) -> float:
    """Return the seconds to wait before the next start, after a wait of `wait` and a start that lived `lived`."""
    return min(max(FIRST_WAIT_S, 2 * wait), LONGEST_WAIT_S) if lived < AT_ONCE_S else 0.0


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"
