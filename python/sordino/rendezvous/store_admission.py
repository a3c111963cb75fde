"""Join requests at a torch.distributed store, at which the ranks of a running job have met.

The store handles one request after the other. So no number is assigned twice, and the first decision written for a vote
is final.

| key | value | written by |
|---|---|---|
| job | number of ranks, and whether processes may join | first rank, when all have met |
| alive | a count that grows while the job runs | first rank |
| over | "yes" or "no"; valid while `alive` does not grow | first rank, at the beginning and the end of the job |
| numbers | count of processes that have come later | each such process |
| requests | count of join requests | newcomer |
| request/K | number of the newcomer, and its introduction | newcomer |
| request/K/beat | a count that grows while the newcomer waits | newcomer |
| request/K/verdict | verdict, with the plan or the reason | first rank |
| vote/NAME/R | "yes" | rank R |
| vote/NAME/count | count of these | each of them |
| vote/NAME | "yes" or "no": the decision | a rank that has seen all votes, or has waited too long |

All values except counts are signed (store.py). A forged count can delay a newcomer, but cannot change a decision: the
ranks refuse a number that another process has.

A thread of the first rank reads the join requests, so that training does not wait for a store whose machine is lost.
"""

from __future__ import annotations

import hmac
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sordino.awake import AwakeClock
from sordino.errors import TransportError
from sordino.log import logger
from sordino.rendezvous.join_requests import Verdict
from sordino.rendezvous.store import StoreRendezvous, does_not_answer, store_answers

_log = logger(__name__)
_LATEST = "sordino/latest"  # prefix of the job that has begun last at the store
_NAP_S = 0.05
_LOOK_S = 0.2  # interval at which the first rank reads the join requests
_BEAT_S = 0.25
_STALE_S = 5.0  # a process without a beat for this time counts as gone
_MOST_REQUESTS = 64  # maximum number that the first rank follows at a time
_STEP_S = 2.0  # maximum time that an AwakeClock counts between two readings


@dataclass(frozen=True)
class Job:
    """Facts about a job, as its first rank has written them.

    Attributes:
        size: number of ranks with which it began.
        grows: whether processes may join.
    """

    size: int
    grows: bool


def latest_job(store: Any) -> str:
    """Return the prefix of the job that has begun last at a store; "" if none has.

    Raises:
        TransportError: the store does not answer.
    """
    try:
        return bytes(store.get(_LATEST)).decode(errors="replace") if store.check([_LATEST]) else ""
    except RuntimeError as error:  # torch raises this for errors of stores
        raise does_not_answer(error) from error


class StoreAdmission(StoreRendezvous):
    """Rendezvous at a store, at which processes can join. The arguments are those of `StoreRendezvous`."""

    def __init__(self, store: Any, prefix: str, rank: int, token: bytes, timeout: float, warning: float) -> None:
        super().__init__(store, prefix, rank, token, timeout, warning)
        self._request_of: dict[int, int] = {}  # by the newcomer's number: its latest request
        self._answered: set[int] = set()  # requests
        self._waiting: list[int] = []  # requests, as the thread has seen them
        self._seen = 0.0  # time.monotonic() of that
        self._looker: threading.Thread | None = None
        self._stopped = threading.Event()

    # ---- the job -----------------------------------------------------------------------------------------------

    def begin(self, size: int, grows: bool) -> None:
        """Write that all ranks of the job have met. Called on the first rank."""
        with store_answers():
            self._write("over", "no")  # an earlier job of the same processes may have written "yes"
            self._write("job", json.dumps([size, grows]))
            self._store.set(_LATEST, self.prefix)

    def job(self) -> Job | None:
        """Return the facts about the job; None if its ranks have not all met."""
        with store_answers():
            written = self._read("job")
        return None if written is None else Job(*json.loads(written))

    def has_met(self, key: str, size: int) -> bool:
        """Return whether all `size` ranks have met in the round `key`."""
        with store_answers():
            return bool(self._store.check([f"{self._place(key, range(size))}/all"]))

    def is_over(self) -> bool:
        """Return whether the first rank has written that the job is over."""
        with store_answers():
            return self._read("over") == "yes"

    def end(self, over: bool) -> None:
        """End the thread, if there is one. `over`: write that the job is over, if the store answers."""
        self._stopped.set()
        if self._looker is not None:
            self._looker.join(_STEP_S)
            if self._looker.is_alive():  # it is blocked in the store, where a write of this thread would block, too
                return
            self._looker = None
        if over:
            with store_answers():
                self._write("over", "yes")

    def new_number(self, size: int) -> int:
        """Return a number that no process of the job has had. `size`: number of ranks with which it began."""
        with store_answers():
            return size + int(self._store.add(self._name("numbers"), 1)) - 1

    # ---- votes -------------------------------------------------------------------------------------------------

    def vote(self, key: str, ranks: Sequence[int], agrees: bool, seconds: float) -> bool:
        """Return whether all these ranks have agreed. See `SocketRendezvous.vote`."""
        names = [f"vote/{key}/{rank}" for rank in ranks]
        clock = AwakeClock(_STEP_S)
        with store_answers():
            if agrees:
                self._write(f"vote/{key}/{self._rank}", "yes")
                last = self._store.add(self._name(f"vote/{key}/count"), 1) >= len(names)
                if last and all(self._read(name) == "yes" for name in names):
                    self._decide(key, "yes")
            else:
                self._decide(key, "no")
            while (decided := self._read(f"vote/{key}")) is None:
                if clock.now() > seconds:
                    self._decide(key, "no")
                time.sleep(_NAP_S)
        return decided == "yes"

    def _decide(self, key: str, decision: str) -> None:
        name = self._name(f"vote/{key}")
        self._store.compare_set(name, "", self._sealed(name, decision))

    # ---- the ranks' side ---------------------------------------------------------------------------------------

    def waits(self) -> bool:
        """Return whether a process waits to join, as far as this rank knows. Does not wait for the store."""
        if self._looker is None:
            self._stopped.clear()
            self._looker = threading.Thread(target=self._look, name="sordino join requests", daemon=True)
            self._looker.start()
        return bool(self._unanswered())

    def _unanswered(self) -> list[int]:
        fresh = time.monotonic() - self._seen < _STALE_S  # else the store does not answer
        return [request for request in self._waiting if request not in self._answered] if fresh else []

    def newcomers(self) -> list[tuple[int, bytes]]:
        """Return the processes that want to join the job: their numbers and introductions.

        A process that was stopped for a while has asked again. Only its latest request counts.

        Raises:
            TransportError: the store does not answer.
        """
        self.waits()
        found: dict[int, bytes] = {}
        with store_answers():
            for request in self._unanswered():
                try:
                    said, introduction = json.loads(self._read(f"request/{request}") or "")
                    number = int(said)
                    if number in found:
                        self._answered.add(self._request_of[number])
                    found[number] = str(introduction).encode()
                    self._request_of[number] = request
                except (TransportError, ValueError, TypeError, OverflowError, RecursionError) as error:
                    _log.warning("a process that is no newcomer of this job has asked to join at the store: %s", error)
                    self._answered.add(request)
                    self._write(f"request/{request}/verdict", Verdict.REFUSED.value)
        return list(found.items())

    def answer(self, newcomer: int, verdict: Verdict, text: bytes) -> None:
        """Answer a newcomer, with the plan of the next world or the reason of the refusal."""
        request = self._request_of.pop(newcomer, None)
        if request is not None:
            self._answered.add(request)
            with store_answers():
                self._write(f"request/{request}/verdict", f"{verdict.value} {text.decode()}")

    def _look(self) -> None:
        """Poll the join requests, and increment `alive`."""
        clock, following = AwakeClock(_STEP_S), 0
        beats: dict[int, tuple[int, float, bool]] = {}  # open requests: count, time of the last change, whether it grew
        try:
            self._write("over", "no")  # a first rank that has ended may have written "yes"
            while not self._stopped.wait(_LOOK_S):
                self._store.add(self._name("alive"), 1)
                count, now = self._count("requests"), clock.now()
                while following < count and len(beats) < _MOST_REQUESTS:
                    beats[following] = self._count(f"request/{following}/beat"), now, False
                    following += 1
                for request, (before, changed, grew) in list(beats.items()):
                    beat = self._count(f"request/{request}/beat")
                    if beat != before:
                        changed, grew = now, True
                    beats[request] = beat, changed, grew
                    if now - changed > _STALE_S or self._is_answered(request):
                        del beats[request]
                self._waiting = [request for request, (_, _, grew) in beats.items() if grew]
                self._seen = time.monotonic()
        except RuntimeError as error:  # torch raises this for errors of stores
            _log.warning("no process can join the job any more: %s", does_not_answer(error))
            self._waiting = []

    def _is_answered(self, request: int) -> bool:
        try:
            return self._read(f"request/{request}/verdict") is not None
        except TransportError:  # a stranger has written it
            return False

    # ---- the newcomer's side -----------------------------------------------------------------------------------

    def ask_to_join(self, introduction: bytes, warning: float) -> tuple[Verdict, bytes]:
        """Ask to join the job. Return the verdict, and the plan or the reason. Waits until the first rank answers.

        Args:
            introduction: what the first rank must know of this process.
            warning: seconds until a warning that no rank answers.

        Raises:
            TransportError: the store is gone, the job is over, or no rank has answered in time.
        """
        clock, warned = AwakeClock(_STEP_S), False
        with store_answers():
            request, alive, heard = self._new_request(introduction), self._count("alive"), clock.now()
            beat, last = 0.0, time.monotonic()
            while True:
                verdict = self._read(f"request/{request}/verdict")
                if verdict is not None:
                    word, _, text = verdict.partition(" ")
                    return Verdict(word), text.encode()
                now = clock.now()
                if now >= beat:
                    beat = now + _BEAT_S
                    self._store.add(self._name(f"request/{request}/beat"), 1)
                    if (count := self._count("alive")) != alive:
                        alive, heard = count, now
                if time.monotonic() - last > _STALE_S / 2:  # this process was stopped, and counts as gone
                    request = self._new_request(introduction)
                last = time.monotonic()
                if now - heard > _STALE_S and self._read("over") == "yes":
                    raise TransportError(
                        f"process {self._rank} has asked to join a job that has ended ({self.prefix}); start a new "
                        "job with another store"
                    )
                if now - heard > self._timeout:
                    raise TransportError(
                        f"process {self._rank} has come to a job ({self.prefix}) of which no rank has answered for "
                        f"{self._timeout:g} s ({self._limit}). If all are lost, start a new job with another store"
                    )
                if now > warning and not warned:
                    warned = True
                    _log.warning(
                        "stalled: process %d has waited %.0f s to join the job. Its ranks let newcomers in at "
                        "commit() of hvd.elastic.run",
                        self._rank,
                        now,
                    )
                time.sleep(_NAP_S)

    def _new_request(self, introduction: bytes) -> int:
        request = int(self._store.add(self._name("requests"), 1)) - 1
        self._write(f"request/{request}", json.dumps([self._rank, introduction.decode()]))
        return request

    # ---- signed values -----------------------------------------------------------------------------------------

    def _name(self, key: str) -> str:
        return f"{self.prefix}/{key}"

    def _has(self, key: str) -> bool:
        return bool(self._store.check([self._name(key)]))

    def _count(self, key: str) -> int:
        return int(self._store.add(self._name(key), 0))

    def _write(self, key: str, text: str) -> None:
        self._store.set(self._name(key), self._sealed(self._name(key), text))

    def _read(self, key: str) -> str | None:
        """Return a value; None if it has not been written. Raises TransportError if it is not signed correctly."""
        if not self._has(key):
            return None
        sealed, name = bytes(self._store.get(self._name(key))).decode(errors="replace"), self._name(key)
        length = 2 * len(self._signature(name, b""))
        text = sealed[length:]
        if not hmac.compare_digest(sealed.encode(), self._sealed(name, text).encode()):
            raise TransportError(f"{name} in the store is not signed with this process's SORDINO_TOKEN")
        return text

    def _sealed(self, name: str, text: str) -> str:
        return self._signature(name, text.encode()).hex() + text
