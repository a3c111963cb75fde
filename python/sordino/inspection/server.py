"""The thread of a rank that answers `sordino inspect`."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading

from sordino.inspection.address import address_of, uid_of_peer
from sordino.inspection.state import state
from sordino.log import logger

_log = logger(__name__)
_RETRY_S = 0.2


class Server:
    """Thread that answers one question after the other, from processes of this user or root."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind("\0" + address_of(os.getuid(), self._process))
        self._socket.listen()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="sordino-inspect", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if self._closed.wait(_RETRY_S):
                    return
                continue  # for example, no file descriptor is free at the moment
            with connection, contextlib.suppress(OSError):  # the other side may leave
                if uid_of_peer(connection) in (os.getuid(), 0):
                    connection.settimeout(1)
                    connection.sendall(json.dumps(state()).encode())

    def close(self) -> None:
        """End the thread. In a forked child, which does not have the thread, only close the socket."""
        self._closed.set()
        if os.getpid() == self._process:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._thread.join()
        self._socket.close()


_server: Server | None = None


def start() -> None:
    """Let this process answer, if it does not yet. A failure is only logged."""
    global _server
    if _server is not None:
        return
    try:
        _server = Server()
    except OSError as error:
        _log.info("sordino inspect will not find this process: %s", error)


def stop() -> None:
    """Stop answering."""
    global _server
    if _server is not None:
        _server.close()
        _server = None


os.register_at_fork(after_in_child=stop)
