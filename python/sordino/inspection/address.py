"""Addresses of the Unix sockets on which ranks answer `sordino inspect`, and the user at the other end of a connection.

The command imports this module, and should not wait for `import torch`.
"""

from __future__ import annotations

import socket
import struct

PREFIX = "sordino-inspect"
_CREDENTIALS = struct.Struct("3i")  # pid, uid and gid of the other side


def address_of(uid: int, pid: int) -> str:
    """Return the address of a process in the abstract namespace, without the leading NUL."""
    return f"{PREFIX}/{uid}/{pid}"


def uid_of_peer(connection: socket.socket) -> int:
    """Return the user id of the process at the other end of a Unix socket."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])
