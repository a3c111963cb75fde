"""Launcher's side of the rendezvous of ranks on one machine (sockets.py has the rank's side, and the frames)."""

from __future__ import annotations

import contextlib
import hmac
import os
import selectors
import socket
from functools import partial
from pathlib import Path
from typing import Any

from sordino.errors import UsageError
from sordino.rendezvous.frames import Frames, frame
from sordino.rendezvous.join_requests import JoinRequests
from sordino.rendezvous.sockets import NO_NUMBER
from sordino.rendezvous.votes import Votes

_MOST_BYTES = 1 << 20
_LONGEST_PATH = 107  # of a socket, in bytes
_MOST_OF_STRANGERS = 1 << 10  # maximum size in bytes of a frame before the token


class RendezvousServer:
    """Launcher's side of the rendezvous. It answers ranks from within the launcher's event loop.

    Args:
        path: path of the socket, which is created.
        token: secret that ranks must send.
        events: selector to which the socket and its connections are added; their data is a function to call.
        size: number of ranks that the launcher starts first.

    Raises:
        UsageError: the socket cannot be made.
    """

    def __init__(self, path: Path, token: bytes, events: selectors.BaseSelector, size: int) -> None:
        self._token, self._events = token, events
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            self._listener.bind(str(path))
        except OSError as error:
            self._listener.close()
            too_long = len(os.fsencode(path)) > _LONGEST_PATH
            fix = (
                "set TMPDIR to a shorter path"
                if too_long
                else "free space in its folder, or permit this user to write there"
            )
            raise UsageError(
                f"{path}: this socket, where the ranks meet, cannot be made: {error.strerror or error}; {fix}"
            ) from error
        self._listener.listen(1024)
        self._listener.setblocking(False)
        events.register(self._listener, selectors.EVENT_READ, self._accept)
        self._rounds: dict[tuple[str, tuple[int, ...]], dict[int, tuple[_Visitor, int, bytes]]] = {}
        self._gone: set[int] = set()
        self._join_requests, self._votes = JoinRequests(), Votes()
        self._started, self._next = frozenset(range(size)), size
        self._foreign: set[int] = set()  # numbers of processes that the launcher has not started
        self._visitors: set[_Visitor] = set()

    def close(self) -> None:
        """Close the socket and all connections."""
        for visitor in list(self._visitors):
            self._dismiss(visitor)
        self._events.unregister(self._listener)
        self._listener.close()

    def new_number(self) -> int:
        """Return a number that no process of the job has had."""
        self._next += 1
        return self._next - 1

    def left(self, rank: int) -> None:
        """Note that a rank has ended, or is lost to the others. Tell the ranks that wait for it."""
        self._gone.add(rank)
        self._join_requests.left(rank)
        for (key, ranks), shown in list(self._rounds.items()):
            self._answer(key, ranks, shown)
        self._votes.note_ended(self._gone)
        self._dismiss_newcomers_if_alone()

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
        visitor.frames.add(data)
        try:
            while (found := visitor.next()) is not None:
                self._take(visitor, *found)
        except (ValueError, KeyError, TypeError, RecursionError):  # not a rank of this job
            self._dismiss(visitor)
        return None

    def _take(self, visitor: _Visitor, head: dict[str, Any], payload: bytes) -> None:
        if visitor.rank is None:
            if not hmac.compare_digest(payload, self._token):
                raise ValueError("a wrong token")
            visitor.rank = int(head["rank"])
            return
        request = int(head.get("n", 0))
        if head.get("join") == "number":
            number = self.new_number()
            self._foreign.add(number)
            visitor.say(request, {"number": number}, b"")
            return
        if "join" in head:
            self._join_requests.take(visitor.rank, partial(visitor.say, request), head, payload)
            self._dismiss_newcomers_if_alone()
            return
        ranks = tuple(int(rank) for rank in head["ranks"])
        if "vote" in head:
            key, agrees = str(head["vote"]), head["agrees"] is True
            tell = partial(visitor.tell, request)
            self._votes.take(key, ranks, visitor.rank, agrees, tell, self._gone)
            return
        if "missing" in head:
            shown = self._rounds.get((head["missing"], ranks), {})
            visitor.say(request, {"missing": [rank for rank in ranks if rank not in shown]}, b"")
            shown.pop(visitor.rank, None)
            return
        if visitor.rank not in ranks:
            raise ValueError("a round of other ranks")
        key = str(head["key"])
        round_ = self._rounds.setdefault((key, ranks), {})
        round_[visitor.rank] = visitor, request, payload
        self._answer(key, ranks, round_)

    def _answer(self, key: str, ranks: tuple[int, ...], shown: dict[int, tuple[_Visitor, int, bytes]]) -> None:
        missing = [rank for rank in ranks if rank not in shown]
        lost = [rank for rank in missing if rank in self._gone]
        if missing and not lost:
            return
        del self._rounds[key, ranks]
        for visitor, request, _ in shown.values():
            if lost:
                visitor.say(request, {"lost": lost[0]}, b"")
            else:
                for rank in ranks:
                    visitor.say(request, {}, shown[rank][2])

    def _dismiss_newcomers_if_alone(self) -> None:
        """Tell newcomers if no rank remains that could let them in. Ranks of the start count before they connect."""
        connected = {visitor.rank for visitor in self._visitors if visitor.rank not in (None, NO_NUMBER)}
        if self._started | connected <= self._gone | self._join_requests.waiting.keys():
            self._join_requests.close()

    def _dismiss(self, visitor: _Visitor) -> None:
        self._visitors.discard(visitor)
        self._events.unregister(visitor.connection)
        visitor.connection.close()
        if visitor.rank in self._foreign:
            self.left(visitor.rank)


class _Visitor:
    """One connection to the server, and its rank once that is known."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.frames = connection, Frames()
        self.rank: int | None = None

    def next(self) -> tuple[dict[str, Any], bytes] | None:
        """Return the next frame; None if it is not complete yet. Raises ValueError if it is invalid."""
        return self.frames.next(_MOST_OF_STRANGERS if self.rank is None else _MOST_BYTES)

    def say(self, request: int, head: dict[str, Any], payload: bytes) -> None:
        """Send a frame that answers a request. A rank that has ended does not get it."""
        with contextlib.suppress(OSError):
            self.connection.setblocking(True)
            self.connection.sendall(frame({**head, "n": request}, payload))
            self.connection.setblocking(False)

    def tell(self, request: int, decided: bool) -> None:
        """Send the outcome of a vote."""
        self.say(request, {"decided": decided}, b"")
