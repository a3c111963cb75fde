"""Two processes instead of one, so that a job's launcher can be killed in any way and nothing of the job stays.

The process that the user started does nothing but wait; a copy of it does the work. Each hears of the other's end and
clears away: the copy ends the job when the first is killed, and the first adopts and ends what a killed copy leaves.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable

from sordino.cli.processes import StopSignals, end_with_parent, sender, subreaper

_LONGER_S = 15.0  # the copy kills the job first, and has to tidy up


def guarded(work: Callable[[StopSignals], int], clear: Callable[[], None], grace: float) -> int:
    """Call `work` in a process of its own and return its status, 128 + N if signal N ended it.

    Args:
        work: gets the signals that mean "stop the job". An exception is printed and makes status 1.
        clear: removes what `work` leaves behind; called after it by both processes, for one may be gone.
        grace: seconds that the job has after such a signal.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    me = os.getpid()
    with StopSignals(grace + _LONGER_S) as stop:
        try:
            with subreaper():
                child = os.fork()
                if child == 0:
                    stop.grace = grace
                    _work(me, work, clear, stop)
                with stop.to(sender(child)):
                    _, status = os.waitpid(child, 0)
        finally:
            clear()
    code = os.waitstatus_to_exitcode(status)
    if code < 0 and stop.received:
        return 128 + stop.received[0]
    return code if code >= 0 else 128 - code


def _work(parent: int, work: Callable[[StopSignals], int], clear: Callable[[], None], stop: StopSignals) -> None:
    """Live the copy's life. It never returns into what the first process was doing."""
    status = 1
    try:
        # Ctrl-C in a terminal reaches the first process only, which hands it on.
        os.setpgid(0, 0)
        end_with_parent()
        try:
            if os.getppid() == parent:
                status = work(stop)
        finally:
            clear()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
