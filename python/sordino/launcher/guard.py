"""Guard of a job: two processes, so that no process of the job remains if a launcher is killed in any way.

The process that the user started (the first) passes on signals and input. Its child (the copy) does the work. To clear
means to remove the job's files.

| event | reaction |
|---|---|
| a signal for the job (`StopSignals`) | the first process passes it to the copy, which passes it to the job |
| input at the terminal | the first process passes it to the job's stdin (`terminal.py`) |
| the first process is killed | the copy gets SIGTERM, ends the job, and clears |
| the copy is killed | the first process adopts and ends the job's processes (`subreaper`), and clears |
| the work is done | the copy clears and exits with its status; the first process clears and returns it |
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable

from sordino.errors import SordinoError, UsageError
from sordino.launcher import terminal
from sordino.launcher.descriptors import say
from sordino.launcher.processes import StopSignals, end_with_parent, sender, subreaper

_LONGER_S = 15.0  # additional grace of the copy, which first kills the job and clears


def guarded(work: Callable[[StopSignals], int], clear: Callable[[], None], grace: float) -> int:
    """Call `work` in a child process and return its status; 128 + N if signal N ended it.

    Args:
        work: gets the signals for the job. An exception is printed and gives status 1, a UsageError status 2.
        clear: removes files of `work`; called after it by both processes, because either may have been killed.
        grace: seconds from a stop signal until the job is killed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    me = os.getpid()
    with StopSignals(grace + _LONGER_S) as stop, terminal.Input() as typed:
        try:
            with subreaper():
                child = os.fork()
                if child == 0:
                    stop.grace = grace
                    typed.take_place_of_stdin()
                    _work(me, work, clear, stop)
                with stop.to(sender(child), child):
                    typed.pass_on_until_the_end_of(child)
                    _, status = os.waitpid(child, 0)
        finally:
            clear()
    code = os.waitstatus_to_exitcode(status)
    if code < 0 and stop.received:
        return 128 + stop.received[0]
    return code if code >= 0 else 128 - code


def _work(parent: int, work: Callable[[StopSignals], int], clear: Callable[[], None], stop: StopSignals) -> None:
    """Run the copy. It does not return, so that it does not continue the first process's program."""
    status = 1
    try:
        # With its own group, Ctrl-C in a terminal reaches the first process only, which passes it on.
        os.setpgid(0, 0)
        end_with_parent()
        try:
            if os.getppid() == parent:
                status = work(stop)
        finally:
            clear()
    except SordinoError as error:
        say(str(error))
        status = 2 if isinstance(error, UsageError) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
