"""Supervisor: parent process of a rank, which reports how the rank ended. Fault-tolerant Open MPI does not report it.

  python -I -S supervisor.py FOLDER COMMAND [ARGUMENT ...]       as a link in FOLDER, for ranks on this machine
  python -I -S supervisor.py stderr:TOKEN COMMAND [ARGUMENT ...] as a line on stderr, for others

It uses the standard library only, so that it starts in milliseconds. `sordino` is not imported: the format of messages
(rendezvous/wire.py) is loaded by its path.

| event | reaction |
|---|---|
| the rank ends | the supervisor reports it and ends in the same way, so that Open MPI notices a death without delay |
| the supervisor dies | the kernel kills the rank |
| the launcher dies | the supervisor ends the rank and its process group: SIGTERM, after 1 s SIGKILL |

Signals are blocked here. Open MPI signals the process group, so the rank gets them anyway, and would get them twice if
the supervisor passed them on.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import resource
import runpy
import signal
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_GRACE_S = 1.0
_LOOK_S = 0.01


def main() -> None:
    """Run the command to its end, report how it ended, and end in the same way."""
    where, *command = sys.argv[1:]
    wire = runpy.run_path(str(Path(__file__).parents[1] / "rendezvous" / "wire.py"))  # now: a new build may replace it
    launcher, me = os.getppid(), os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    # The kernel also sends it when only a thread of the launcher ends, so the parent is checked on receipt.
    _at_parents_death(signal.SIGTERM)
    rank = os.fork()
    if rank == 0:
        _at_parents_death(signal.SIGKILL)
        if os.getppid() == me:
            os.environ["SORDINO_LAUNCHER"] = where  # for the rank's own notices (rendezvous/notices.py)
            _become(command, before)
        os._exit(1)
    while True:
        got = signal.sigwait({signal.SIGCHLD, signal.SIGTERM})
        pid, status = os.waitpid(rank, os.WNOHANG)
        if pid == rank:
            break
        if got == signal.SIGTERM and os.getppid() != launcher:
            _end_the_group(rank)
    code = os.waitstatus_to_exitcode(status)
    # A full disk or a closed stderr must not change how this process ends. The launcher notices a missing report.
    with contextlib.suppress(OSError):
        own = int(os.environ["OMPI_COMM_WORLD_RANK"])
        wire["send"](where, wire["Message"](own, wire["ENDED"], code=code, at=time.time()))
    _end_like(code)


def _become(command: list[str], mask: set[int | signal.Signals]) -> None:
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these, and the program would inherit that
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        with contextlib.suppress(OSError):
            print(f"sordino run: {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127)


def _end_the_group(rank: int) -> None:
    """End this rank after the launcher was killed: SIGTERM, and after a grace SIGKILL.

    If the supervisor leads the group, SIGKILL ends the supervisor, too.
    """
    leads = os.getpgrp() == os.getpid()  # true under Open MPI
    end = functools.partial(os.killpg, os.getpid()) if leads else functools.partial(os.kill, rank)
    end(signal.SIGTERM)
    for _ in range(round(_GRACE_S / _LOOK_S)):  # counts sleeps, as a clock includes stopped time
        if os.waitpid(rank, os.WNOHANG)[0] != 0:
            break
        time.sleep(_LOOK_S)
    end(signal.SIGKILL)
    os._exit(128 + signal.SIGTERM)


def _end_like(code: int) -> None:
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # one core file is enough
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)


def _at_parents_death(number: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


if __name__ == "__main__":
    main()
