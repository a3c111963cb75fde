"""Rendezvous of ranks on one machine without MPI or torch: through a socket in the launcher's folder.

This is the rank's side; server.py is the launcher's. In a round, each of its ranks sends a value to the launcher, and
gets the values of all. A round is identified by its key and its ranks. Every frame has a head (JSON) and a payload. A
request has a number `n`, and all frames that answer it have the same number. So an answer that comes too late is not
taken for another one.

| sender | head | payload | meaning |
|---|---|---|---|
| rank | rank | token | first frame of a connection |
| rank | key, ranks | its value | takes part in the round |
| rank | missing (a key), ranks | | leaves the round, and asks which ranks have not sent a value |
| rank | vote (a key), ranks, agrees | | takes part in a vote (votes.py) |
| any | join: number | | asks for a new number, for a process that the launcher has not started |
| newcomer | join: ask | its introduction | asks to join the running job (join_requests.py) |
| rank | join: any | | asks how many newcomers wait |
| rank | join: who | | asks which newcomers wait |
| rank | join: invited or refused, to (a number) | plan or reason | answers a newcomer |
| launcher | | a value | one frame for each rank of the round, in order, when all have sent a value |
| launcher | lost (a rank) | | a rank ended before it came to the round |
| launcher | missing (ranks) | | answer |
| launcher | decided | | outcome of a vote |
| launcher | number | | answer to join: number |
| launcher | waiting (a number) | | answer to join: any |
| launcher | | numbers and introductions, as JSON | answer to join: who |
| launcher | verdict | plan or reason | answer to a newcomer |
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from typing import Any

from sordino.awake import AwakeClock, Deadline
from sordino.errors import PeerLost, Timeout, TransportError
from sordino.fingerprint import rank_list
from sordino.log import logger
from sordino.rendezvous.frames import Frames, frame
from sordino.rendezvous.join_requests import Verdict

_log = logger(__name__)

NO_NUMBER = -1
"""Number of a process that asks for one."""
_LOOK_S = 0.2
_ANSWERS_S = 1.0  # longest wait for an answer that needs no other rank


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
        self._frames, self._requests = Frames(), 0
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.connect(path)
            self._socket.sendall(frame({"rank": rank}, token))
        except OSError as error:
            raise TransportError(f"the launcher that started this rank does not answer at {path}: {error}") from error

    # ---- rounds ------------------------------------------------------------------------------------------------

    def gather(self, key: str, ranks: Sequence[int], mine: bytes, timeout: float | None = None) -> list[bytes]:
        """Return the values of these ranks for this key, in the order of `ranks`. Collective over them.

        Args:
            key: name of the round.
            ranks: ranks of the round, including this rank.
            mine: value of this rank.
            timeout: seconds to wait for the other ranks; None: the timeout of this rendezvous.

        Raises:
            Timeout: some ranks have not come in time. The error has their numbers.
            PeerLost: a rank has ended before it came.
            TransportError: the launcher is gone.
        """
        seconds = self._timeout if timeout is None else timeout
        deadline = Deadline(seconds)
        request = self._ask({"key": key, "ranks": list(ranks)}, mine)
        try:
            shown: list[bytes] = []
            while len(shown) < len(ranks):
                head, payload = self._answer(request, deadline)
                if "lost" in head:
                    raise PeerLost(f"rank {head['lost']} ended before all ranks had met", [head["lost"]])
                shown.append(payload)
            return shown
        except TimeoutError:
            missing = self._missing(key, ranks)
            text = f"waited {seconds:g} s for {rank_list(missing)} to call init()"
            raise Timeout(text, "init", missing) from None

    def _missing(self, key: str, ranks: Sequence[int]) -> list[int]:
        try:
            request = self._ask({"missing": key, "ranks": list(ranks)})
            return list(self._answer(request, Deadline(_ANSWERS_S))[0]["missing"])
        except (TimeoutError, TransportError):
            return []

    def vote(self, key: str, ranks: Sequence[int], agrees: bool, seconds: float) -> bool:
        """Return whether all these ranks have agreed. All of them get the same answer. Collective over them.

        Args:
            key: name of the vote, used once.
            ranks: ranks that must agree, including this rank.
            agrees: whether this rank agrees.
            seconds: time after which this rank does not agree any more, if there is no decision.

        Raises:
            TransportError: the launcher is gone, so there is no answer.
        """
        asked = {"vote": key, "ranks": list(ranks)}
        try:
            return bool(self._answer(self._ask({**asked, "agrees": agrees}), Deadline(seconds))[0]["decided"])
        except TimeoutError:
            return bool(self._soon({**asked, "agrees": False}, self._timeout)[0]["decided"])

    # ---- join requests -----------------------------------------------------------------------------------------

    def waits(self) -> bool:
        """Return whether a process waits to join. Raises TransportError as `newcomers`."""
        return bool(self._soon({"join": "any"}, _ANSWERS_S)[0]["waiting"])

    def newcomers(self, seconds: float = _ANSWERS_S) -> list[tuple[int, bytes]]:
        """Return the processes that want to join the job: their numbers and introductions.

        Args:
            seconds: longest wait for the launcher's answer.

        Raises:
            TransportError: the launcher is gone, or does not answer in time.
        """
        _, text = self._soon({"join": "who"}, seconds)
        return [(number, introduction.encode()) for number, introduction in json.loads(text)]

    def answer(self, newcomer: int, verdict: Verdict, text: bytes) -> None:
        """Answer a newcomer, with the plan of the next world or the reason of the refusal."""
        self._ask({"join": verdict.value, "to": newcomer}, text)

    def ask_to_join(self, introduction: bytes, warning: float) -> tuple[Verdict, bytes]:
        """Ask to join the job. Return the verdict, and the plan or the reason. Waits until the first rank answers.

        Args:
            introduction: what the first rank must know of this process.
            warning: seconds until a warning that no rank answers.

        Raises:
            TransportError: the launcher is gone.
        """
        request, clock, warned = self._ask({"join": "ask"}, introduction), AwakeClock(2 * _LOOK_S), False
        while True:
            try:
                head, payload = self._answer(request, Deadline(_LOOK_S))
                return Verdict(head["verdict"]), payload
            except TimeoutError:
                if warned or clock.now() < warning:
                    continue
            warned = True
            _log.warning(
                "stalled: process %d has waited %.0f s to join the job. Its ranks let newcomers in at commit() of "
                "hvd.elastic.run, with on_peer_lost='continue'",
                self._rank,
                clock.now(),
            )

    def new_number(self) -> int:
        """Return a number for a process that is to join the job, and that the launcher does not start."""
        return int(self._soon({"join": "number"}, self._timeout)[0]["number"])

    # ---- frames ------------------------------------------------------------------------------------------------

    def _soon(self, head: dict[str, Any], seconds: float) -> tuple[dict[str, Any], bytes]:
        """Return the answer to a request that needs no other rank."""
        try:
            return self._answer(self._ask(head), Deadline(seconds))
        except TimeoutError as error:
            raise TransportError(f"the launcher of the job has not answered for {seconds:g} s") from error

    def _ask(self, head: dict[str, Any], payload: bytes = b"") -> int:
        """Send a request, and return its number."""
        self._requests += 1
        try:
            self._socket.settimeout(None)
            self._socket.sendall(frame({**head, "n": self._requests}, payload))
        except OSError as error:
            raise _gone(error) from error
        return self._requests

    def _answer(self, request: int, deadline: Deadline) -> tuple[dict[str, Any], bytes]:
        """Return the next answer to a request, and drop answers to others. Raises TimeoutError after the deadline."""
        while True:
            while (found := self._frames.next()) is not None:
                if found[0].get("n") == request:
                    return found
            self._socket.settimeout(_LOOK_S)
            try:
                data = self._socket.recv(1 << 16)
            except TimeoutError:
                if deadline.passed():
                    raise
                continue
            except OSError as error:
                raise _gone(error) from error
            if not data:
                raise _gone("it has closed the connection")
            self._frames.add(data)


def _gone(why: object) -> TransportError:
    return TransportError(f"the launcher that started this rank is gone: {why}")
