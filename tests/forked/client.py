"""Stand-in for a Python process that the fork server makes: `python -I -S client.py [-c CODE | -m MODULE | FILE] ...`.

It ends as the fork does, by the same signal if one ended it. It passes on the signals that it gets; when it is killed,
the server kills the fork. If there is no server, or one with packages from another PYTHONPATH, it becomes a real
Python.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys

_HANDED_ON = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    """Have the server fork, and end as the fork does."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDED_ON)
    server = socket.socket(socket.AF_UNIX)
    what = {
        "argv": sys.argv[1:],
        "folder": os.getcwd(),
        "environ": dict(os.environ),
        "mask": [int(number) for number in before],
    }
    request = json.dumps(what).encode()
    answers, line = server.makefile("r"), ""
    with contextlib.suppress(OSError):  # there is no server, or it has ended
        server.connect(os.environ.get("FORK_SERVER_OF_TESTS", ""))
        socket.send_fds(server, [len(request).to_bytes(8, "little")], [0, 1, 2])
        server.sendall(request)
        line = answers.readline()
    if not line.startswith("pid "):
        become_python(before)
    fork = int(line.split()[1])
    for number in _HANDED_ON if fork else ():  # 0: in another PID namespace; what ends this process ends the fork, too
        signal.signal(number, lambda number, _: hand_on(fork, number))
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        status = answers.readline()
    except OSError:
        status = ""
    end_like(int(status.split()[1]) if status else -signal.SIGKILL)


def hand_on(fork: int, number: int) -> None:
    """Pass a signal on, if the fork has not ended meanwhile."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(fork, number)


def become_python(mask: set[int | signal.Signals]) -> None:
    """Start the requested Python for real, in this process."""
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])


def end_like(code: int) -> None:
    """End with this status or, if it is negative, by this signal."""
    if code < 0:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
