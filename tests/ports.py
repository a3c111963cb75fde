"""Free ports of this machine, for processes that a test starts."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

_LEAST = 10_000
_random = random.SystemRandom()  # parallel test processes must not choose the same ports


def free_ports(count: int = 1) -> int:
    """Return the first of `count` consecutive free ports.

    They are below the range from which the kernel assigns ports, so no other socket gets one of them by chance.
    """
    given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        first = _random.randrange(_LEAST, given - count)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
