"""Rendezvous of ranks on one machine without MPI or torch: through a socket in the launcher's folder.

In a round, each of its ranks sends a value to the launcher, and gets the values of all. A round is identified by its
key and its ranks. Every frame has a head (JSON) and a payload:

| sender | head | payload | meaning |
|---|---|---|---|
| rank | rank | token | first frame of a connection |
| rank | key, ranks | its value | takes part in the round |
| rank | missing (a key), ranks | | asks which ranks have not sent a value |
| launcher | | a value | one frame for each rank of the round, in order, when all have come |
| launcher | lost (a rank) | | a rank ended before it came to the round |
| launcher | missing (ranks) | | answer |
"""

from __future__ import annotations

import contextlib
import hmac
import json
import selectors
import socket
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sordino.awake import Deadline
from sordino.errors import PeerLost, Timeout, TransportError

_LENGTHS = struct.Struct("!II")  # lengths of a frame's head and payload
_MOST_BYTES = 1 << 20
_MOST_OF_STRANGERS = 1 << 10  # maximum size of a frame before the token
_LOOK_S = 0.2
_ANSWERS_S = 1.0  # longest wait for the launcher's list of missing ranks


class SocketRendezvous:
    """Rank's side of the rendezvous.

    Args:
        path: path of the launcher's socket.
        token: secret that the launcher has given to all its ranks.
        rank: rank of this process.
        timeout: seconds to wait for the other ranks.

    Raises:
        TransportError: the launcher does not answer.
    """

    def __init__(self, path: str, token: bytes, rank: int, timeout: float) -> None:
        self._rank, self._timeout = rank, timeout
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.connect(path)
            self._socket.sendall(_frame({"rank": rank}, token))
        except OSError as error:
            raise TransportError(f"the launcher that started this rank does not answer at {path}: {error}") from error

    def gather(self, key: str, ranks: Sequence[int], mine: bytes) -> list[bytes]:
        """Return the values of these ranks for this key, in the order of `ranks`. Collective over them.

        Args:
            key: name of the round.
            ranks: ranks of the round, including this rank.
            mine: value of this rank.

        Raises:
            Timeout: some ranks have not come in time. The error has their numbers.
            PeerLost: a rank has ended before it came.
            TransportError: the launcher is gone.
        """
        deadline = Deadline(self._timeout)
        try:
            self._socket.settimeout(None)
            self._socket.sendall(_frame({"key": key, "ranks": list(ranks)}, mine))
            shown: list[bytes] = []
            while len(shown) < len(ranks):
                head, payload = _received(self._socket, deadline)
                if "lost" in head:
                    raise PeerLost(f"rank {head['lost']} ended before all ranks had met", [head["lost"]])
                shown.append(payload)
            return shown
        except TimeoutError:
            missing = self._missing(key, ranks)
            text = f"waited {self._timeout:g} s for ranks {', '.join(map(str, missing))} to call init()"
            raise Timeout(text, "init", missing) from None
        except OSError as error:
            raise TransportError(f"the launcher that started this rank is gone: {error}") from error

    def _missing(self, key: str, ranks: Sequence[int]) -> list[int]:
        with contextlib.suppress(OSError):
            self._socket.settimeout(_ANSWERS_S)
            self._socket.sendall(_frame({"missing": key, "ranks": list(ranks)}, b""))
            return list(_received(self._socket, Deadline(_ANSWERS_S))[0]["missing"])
        return []


class Desk:
    """Launcher's side of the rendezvous. It answers ranks from within the launcher's event loop.

    Args:
        path: path of the socket, which is created.
        token: secret that ranks must send.
        events: selector to which the socket and its connections are added; their data is a function to call.
    """

    def __init__(self, path: Path, token: bytes, events: selectors.BaseSelector) -> None:
        self._token, self._events = token, events
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(1024)
        self._listener.setblocking(False)
        events.register(self._listener, selectors.EVENT_READ, self._accept)
        self._rounds: dict[tuple[str, tuple[int, ...]], dict[int, tuple[_Visitor, bytes]]] = {}
        self._gone: set[int] = set()
        self._visitors: set[_Visitor] = set()

    def close(self) -> None:
        """Close the socket and all connections."""
        for visitor in list(self._visitors):
            self._dismiss(visitor)
        self._events.unregister(self._listener)
        self._listener.close()

    def left(self, rank: int) -> None:
        """Note that a rank has ended, and tell the ranks that wait for it."""
        self._gone.add(rank)
        for (key, ranks), shown in list(self._rounds.items()):
            self._answer(key, ranks, shown)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            visitor = _Visitor(connection)
            self._visitors.add(visitor)
            self._events.register(connection, selectors.EVENT_READ, lambda: self._hear(visitor))

    def _hear(self, visitor: _Visitor) -> None:
        try:
            data = visitor.connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            return self._dismiss(visitor)
        visitor.heard += data
        try:
            for head, payload in visitor.frames():
                self._take(visitor, head, payload)
        except (ValueError, KeyError, TypeError, RecursionError):  # not a rank of this job
            self._dismiss(visitor)
        return None

    def _take(self, visitor: _Visitor, head: dict[str, Any], payload: bytes) -> None:
        if visitor.rank is None:
            if not hmac.compare_digest(payload, self._token):
                raise ValueError("a wrong token")
            visitor.rank = int(head["rank"])
            return
        ranks = tuple(int(rank) for rank in head["ranks"])
        if "missing" in head:
            shown = self._rounds.get((head["missing"], ranks), {})
            visitor.say({"missing": [rank for rank in ranks if rank not in shown]}, b"")
            return
        if visitor.rank not in ranks:
            raise ValueError("a round of other ranks")
        key = str(head["key"])
        round_ = self._rounds.setdefault((key, ranks), {})
        round_[visitor.rank] = visitor, payload
        self._answer(key, ranks, round_)

    def _answer(self, key: str, ranks: tuple[int, ...], shown: dict[int, tuple[_Visitor, bytes]]) -> None:
        missing = [rank for rank in ranks if rank not in shown]
        lost = [rank for rank in missing if rank in self._gone]
        if missing and not lost:
            return
        del self._rounds[key, ranks]
        for visitor, _ in shown.values():
            if lost:
                visitor.say({"lost": lost[0]}, b"")
            else:
                for rank in ranks:
                    visitor.say({}, shown[rank][1])

    def _dismiss(self, visitor: _Visitor) -> None:
        self._visitors.discard(visitor)
        self._events.unregister(visitor.connection)
        visitor.connection.close()


class _Visitor:
    """One connection to the desk: its rank, and the received bytes of incomplete frames."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.rank: int | None = None
        self.heard = b""

    def frames(self) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Yield the complete frames.

        Raises:
            ValueError: a frame is invalid.
        """
        while len(self.heard) >= _LENGTHS.size:
            head, payload = _LENGTHS.unpack_from(self.heard)
            if head + payload > (_MOST_BYTES if self.rank is not None else _MOST_OF_STRANGERS):
                raise ValueError("a frame that is longer than the limit")
            end = _LENGTHS.size + head + payload
            if len(self.heard) < end:
                break
            parsed = json.loads(self.heard[_LENGTHS.size : _LENGTHS.size + head])
            if not isinstance(parsed, dict):
                raise ValueError("no head")
            payload_there, self.heard = self.heard[_LENGTHS.size + head : end], self.heard[end:]
            yield parsed, payload_there

    def say(self, head: dict[str, Any], payload: bytes) -> None:
        """Send a frame. A rank that has ended does not get it."""
        with contextlib.suppress(OSError):
            self.connection.setblocking(True)
            self.connection.sendall(_frame(head, payload))
            self.connection.setblocking(False)


def _frame(head: dict[str, Any], payload: bytes) -> bytes:
    text = json.dumps(head).encode()
    return _LENGTHS.pack(len(text), len(payload)) + text + payload


def _received(connection: socket.socket, deadline: Deadline) -> tuple[dict[str, Any], bytes]:
    head, payload = _LENGTHS.unpack(_exactly(connection, _LENGTHS.size, deadline))
    text = _exactly(connection, head, deadline)
    return json.loads(text), _exactly(connection, payload, deadline)


def _exactly(connection: socket.socket, count: int, deadline: Deadline) -> bytes:
    """Return `count` bytes. Raises TimeoutError if they have not come by the deadline."""
    connection.settimeout(_LOOK_S)
    data = b""
    while len(data) < count:
        try:
            more = connection.recv(count - len(data))
        except TimeoutError:
            if deadline.passed():
                raise
            continue
        if not more:
            raise ConnectionResetError("the launcher has closed the connection")
        data += more
    return data
