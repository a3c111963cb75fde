"""Rendezvous of ranks on one machine without MPI or torch: through a socket in the launcher's folder.

In a round, each of its ranks sends a value to the launcher, and gets the values of all. A round is identified by its
key and its ranks. Every frame has a head (JSON) and a payload:

| sender | head | payload | meaning |
|---|---|---|---|
| rank | rank | token | first frame of a connection |
| rank | key, ranks | its value | takes part in the round |
| rank | missing (a key), ranks | | asks which ranks have not sent a value |
| any | door: number | | asks for the number of a process that the launcher has not started |
| newcomer | door: knock | its introduction | asks to join the running job (rendezvous/door.py) |
| rank | door: who | | asks which newcomers wait |
| rank | door: invited or refused, to (a number) | plan or reason | answers a newcomer |
| launcher | | a value | one frame for each rank of the round, in order, when all have come |
| launcher | lost (a rank) | | a rank ended before it came to the round |
| launcher | missing (ranks) | | answer |
| launcher | | numbers and introductions, as JSON | answer to door: who |
| launcher | number | | answer to door: number |
| launcher | verdict | plan or reason | answer to a newcomer |
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
from sordino.log import logger
from sordino.rendezvous.door import Door, Verdict

_log = logger(__name__)

_LENGTHS = struct.Struct("!II")  # lengths of a frame's head and payload
_MOST_BYTES = 1 << 20
_MOST_OF_STRANGERS = 1 << 10  # maximum size of a frame before the token
_LOOK_S = 0.2
NO_NUMBER = -1  # of a process that asks for a number
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

    def gather(self, key: str, ranks: Sequence[int], mine: bytes, timeout: float | None = None) -> list[bytes]:
        """Return the values of these ranks for this key, in the order of `ranks`. Collective over them.

        Args:
            key: name of the round.
            ranks: ranks of the round, including this rank.
            mine: value of this rank.
            timeout: seconds to wait for the other ranks; None: those of this rendezvous.

        Raises:
            Timeout: some ranks have not come in time. The error has their numbers.
            PeerLost: a rank has ended before it came.
            TransportError: the launcher is gone.
        """
        seconds = self._timeout if timeout is None else timeout
        deadline = Deadline(seconds)
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
            text = f"waited {seconds:g} s for ranks {', '.join(map(str, missing))} to call init()"
            raise Timeout(text, "init", missing) from None
        except OSError as error:
            raise TransportError(f"the launcher that started this rank is gone: {error}") from error

    def newcomers(self) -> list[tuple[int, bytes]]:
        """Return the processes that want to join the job: their numbers and introductions.

        Raises:
            TransportError: the launcher is gone.
        """
        _, text = self._asked({"door": "who"}, b"", Deadline(self._timeout))
        return [(number, introduction.encode()) for number, introduction in json.loads(text)]

    def answer(self, newcomer: int, verdict: Verdict, text: bytes) -> None:
        """Answer a newcomer, with the plan of the next world or the reason of the refusal."""
        self._say({"door": verdict.value, "to": newcomer}, text)

    def knock(self, introduction: bytes, warning: float) -> tuple[Verdict, bytes]:
        """Ask to join the job. Return the verdict, and the plan or the reason. Waits until the first rank answers.

        Args:
            introduction: what the first rank must know of this process.
            warning: seconds until a warning that no rank answers.

        Raises:
            TransportError: the launcher is gone.
        """
        self._say({"door": "knock"}, introduction)
        self._socket.settimeout(warning)
        try:
            while True:
                try:
                    self._socket.recv(1, socket.MSG_PEEK)
                    break
                except TimeoutError:
                    _log.warning(
                        "stalled: process %d has waited %.0f s to join the job. Its ranks let newcomers in at commit() "
                        "of hvd.elastic.run, with on_peer_lost='continue'",
                        self._rank,
                        warning,
                    )
                    self._socket.settimeout(None)
            head, payload = _received(self._socket, None)
        except OSError as error:
            raise TransportError(f"the launcher of the job is gone: {error}") from error
        return Verdict(head["verdict"]), payload

    def new_number(self) -> int:
        """Return a number for a process that shall join the job, and that the launcher does not start."""
        head, _ = self._asked({"door": "number"}, b"", Deadline(self._timeout))
        return int(head["number"])

    def _say(self, head: dict[str, Any], payload: bytes) -> None:
        try:
            self._socket.settimeout(None)
            self._socket.sendall(_frame(head, payload))
        except OSError as error:
            raise TransportError(f"the launcher that started this rank is gone: {error}") from error

    def _asked(self, head: dict[str, Any], payload: bytes, deadline: Deadline) -> tuple[dict[str, Any], bytes]:
        self._say(head, payload)
        try:
            return _received(self._socket, deadline)
        except OSError as error:  # also TimeoutError
            raise TransportError(f"the launcher that started this rank does not answer: {error}") from error

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
        size: number of ranks that the launcher starts first.
    """

    def __init__(self, path: Path, token: bytes, events: selectors.BaseSelector, size: int) -> None:
        self._token, self._events = token, events
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(1024)
        self._listener.setblocking(False)
        events.register(self._listener, selectors.EVENT_READ, self._accept)
        self._rounds: dict[tuple[str, tuple[int, ...]], dict[int, tuple[_Visitor, bytes]]] = {}
        self._gone: set[int] = set()
        self._door = Door()
        self._next = size
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
        """Note that a rank has ended, and tell the ranks that wait for it."""
        self._gone.add(rank)
        self._door.left(rank)
        for (key, ranks), shown in list(self._rounds.items()):
            self._answer(key, ranks, shown)
        self._close_door_if_alone()

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
        if head.get("door") == "number":
            number = self.new_number()
            self._foreign.add(number)
            visitor.say({"number": number}, b"")
            return
        if "door" in head:
            self._door.take(visitor.rank, visitor.say, head, payload)
            self._close_door_if_alone()
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

    def _close_door_if_alone(self) -> None:
        """If no rank is left that could let newcomers in, tell them."""
        ranks = {visitor.rank for visitor in self._visitors if visitor.rank is not None and visitor.rank != NO_NUMBER}
        if ranks <= self._gone | self._door.waiting.keys():
            self._door.close()

    def _dismiss(self, visitor: _Visitor) -> None:
        self._visitors.discard(visitor)
        self._events.unregister(visitor.connection)
        visitor.connection.close()
        if visitor.rank in self._foreign:
            self.left(visitor.rank)


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


def _received(connection: socket.socket, deadline: Deadline | None) -> tuple[dict[str, Any], bytes]:
    head, payload = _LENGTHS.unpack(_exactly(connection, _LENGTHS.size, deadline))
    text = _exactly(connection, head, deadline)
    return json.loads(text), _exactly(connection, payload, deadline)


def _exactly(connection: socket.socket, count: int, deadline: Deadline | None) -> bytes:
    """Return `count` bytes. Raises TimeoutError if they have not come by the deadline, if there is one."""
    connection.settimeout(_LOOK_S)
    data = b""
    while len(data) < count:
        try:
            more = connection.recv(count - len(data))
        except TimeoutError:
            if deadline is not None and deadline.passed():
                raise
            continue
        if not more:
            raise ConnectionResetError("the launcher has closed the connection")
        data += more
    return data
