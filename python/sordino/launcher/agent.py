"""Agent: runs one process of an elastic job on its host. It is started there by the launcher, directly or by ssh.

  python -I -S agent.py

The launcher writes to its stdin: a line of JSON with the process to start, then lines with numbers of signals for it.
So the environment, which has the job's secret, does not appear in process lists. The agent uses the standard library
only, so that it starts in milliseconds.

| event | reaction |
|---|---|
| the process ends | the agent kills the rest of its process group, and exits with its status, or 128 + the signal |
| stdin ends: the launcher or the connection is lost | the process group gets SIGTERM, and SIGKILL 1 s later |
| SIGTERM, SIGHUP, SIGINT | the same |
| the agent is killed | the kernel kills the process |
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from typing import Any

_PR_SET_PDEATHSIG = 1
_GRACE_S = 1.0
_LOOK_MS = 50
_FOR_THE_PROGRAM = (signal.SIGUSR1, signal.SIGUSR2)  # not for its children


def main() -> int:
    """Run the process to its end, and return its status."""
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(wakes)
    held = b""
    while b"\n" not in held:
        if not (data := os.read(0, 1 << 16)):
            return 1  # the launcher has ended
        held += data
    line, _, held = held.partition(b"\n")
    try:
        process = _start(json.loads(line))
    except OSError as error:
        print(f"sordino run: {error.filename}: {error.strerror}", file=sys.stderr, flush=True)
        return 127
    waiting, rest_ms = select.poll(), None
    for descriptor in (0, woken):
        waiting.register(descriptor, select.POLLIN)
    try:
        waiting.register(os.pidfd_open(process.pid), select.POLLIN)
    except (AttributeError, OSError):  # an old Python, or a sandbox
        rest_ms = _LOOK_MS
    killed_at: float | None = None
    held = _pass_on(process.pid, held)
    while process.poll() is None:
        ready = [descriptor for descriptor, _ in waiting.poll(rest_ms if killed_at is None else _LOOK_MS)]
        if 0 in ready:
            data = os.read(0, 1 << 16)
            held = _pass_on(process.pid, held + data)
        if killed_at is None and (woken in ready or (0 in ready and not data)):
            _send(process.pid, signal.SIGTERM)
            killed_at = time.monotonic() + _GRACE_S
            for descriptor in (0, woken):
                waiting.unregister(descriptor)
        if killed_at is not None and time.monotonic() >= killed_at:
            _send(process.pid, signal.SIGKILL)
    _send(process.pid, signal.SIGKILL)  # the rest of its group
    code = process.returncode
    return code if code >= 0 else 128 - code


def _start(job: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Start the process in a process group of its own. `environment`: variables; None removes one."""
    environment = dict(os.environ)
    for name, value in job["environment"].items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    # Otherwise each process computes with one thread per core of its host.
    environment.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // job["slots"])))
    environment.setdefault("PYTHONUNBUFFERED", "1")  # its output is a pipe, for which Python would buffer lines
    # Python finds the program in its own PATH, not in that of `environment`.
    os.environ["PATH"] = environment.get("PATH", os.defpath)
    return subprocess.Popen(
        job["words"],
        env=environment,
        cwd=job["folder"],
        stdin=subprocess.DEVNULL,
        preexec_fn=_end_with_the_agent,
        start_new_session=True,
    )


def _end_with_the_agent() -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and the program would inherit that
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _pass_on(pid: int, orders: bytes) -> bytes:
    """Send the signals of all complete lines. Return the rest."""
    *lines, rest = orders.split(b"\n")
    for line in lines:
        _send(pid, int(line))
    return rest


def _send(pid: int, number: int) -> None:
    if number == signal.SIGTSTP:
        number = signal.SIGSTOP  # the kernel ignores SIGTSTP for processes in a session of their own
    with contextlib.suppress(ProcessLookupError, PermissionError):
        (os.kill if number in _FOR_THE_PROGRAM else os.killpg)(pid, number)


if __name__ == "__main__":
    sys.exit(main())
