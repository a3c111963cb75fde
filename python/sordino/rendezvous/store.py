"""Rendezvous of ranks that torchrun and similar launchers have started: through a torch.distributed store.

In a round every rank writes its value. The first rank reads all values, and writes them as one entry, which the others
read. So N ranks make about 4 N requests, not one for each pair.

Any process that reaches the store's port can write to it. If the ranks have a secret (SORDINO_TOKEN), they sign their
values with it, and refuse others.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from sordino.awake import AwakeClock
from sordino.errors import Timeout, TransportError
from sordino.fingerprint import rank_list
from sordino.log import logger
from sordino.rendezvous.roll_call import RollCall

_log = logger(__name__)
_LOOK_S = 1.0  # interval of checks whether another rank has given up
_NAP_S = 0.05  # longest sleep between requests; short, so that signals are handled, which the store's wait() defers
_opened: dict[tuple[str, int], Any] = {}  # by address; kept open, because the store of rank 0 serves the others


class StoreRendezvous:
    """Rendezvous through a store.

    Attributes:
        prefix: prefix of the keys.

    Args:
        store: a torch.distributed.Store.
        prefix: prefix of the keys.
        rank: rank of this process.
        token: secret with which ranks sign their values; empty: values are not signed.
        timeout: seconds to wait for the other ranks.
        warning: seconds until a warning about missing ranks.
    """

    def __init__(self, store: Any, prefix: str, rank: int, token: bytes, timeout: float, warning: float) -> None:
        self._store, self.prefix, self._rank, self._token = store, prefix, rank, token
        self._timeout, self._warning = timeout, warning
        self._limit = "SORDINO_TIMEOUT_S"

    def set_timeout(self, seconds: float) -> None:
        """Set the seconds to wait for the other ranks to the timeout of a process group of torch.distributed."""
        self._timeout, self._limit = seconds, "the timeout of the process group"

    def gather(self, key: str, ranks: Sequence[int], mine: bytes, timeout: float | None = None) -> list[bytes]:
        """Return the values of these ranks for this key, in the order of `ranks`. Collective over them.

        Args:
            key: name of the round. Rounds of other ranks may have the same name.
            ranks: ranks of the round, including this rank.
            mine: value of this rank.
            timeout: seconds to wait for the other ranks; None: the timeout of this rendezvous.

        Raises:
            Timeout: some ranks have not come in time. The error has their numbers.
            TransportError: the store is gone, or a value is not signed correctly.
        """
        place = self._place(key, ranks)
        names = {rank: f"{place}/{rank}" for rank in ranks}
        together, given_up = f"{place}/all", f"{place}/given up"
        with store_answers():
            self._store.set(names[self._rank], self._signature(names[self._rank], mine) + mine)
            awaited = list(names.values()) if self._rank == ranks[0] else [together]
            self._wait(names, lambda: bool(self._store.check(awaited)), ranks[0], given_up, b"", timeout)
            if self._rank == ranks[0]:
                signed = [bytes(self._store.get(name)) for name in names.values()]
                self._store.set(together, _joined(signed))
            else:
                signed = _divided(bytes(self._store.get(together)), len(names))
            return [self._checked(rank, names[rank], one) for rank, one in zip(names, signed)]

    def call_roll(self, size: int) -> None:
        """Agree with all ranks on a new prefix, which no other start at the store has (roll_call.py). Collective.

        Args:
            size: number of ranks.

        Raises:
            Timeout: some ranks have not come in time. The error has their numbers.
            TransportError: the store is gone.
        """
        place = f"{self.prefix}/starts of {size}"
        call, given_up, before = RollCall(self._store, place, self._rank, size), f"{place}/given up", b""
        with store_answers():
            if self._store.check([given_up]):
                before = bytes(self._store.get(given_up))  # of an earlier start
            call.begin()
            self._wait(call.awaited, call.over, 0, given_up, before, None, call.number)
        self.prefix = f"{self.prefix}/{call.name}"

    def _place(self, key: str, ranks: Sequence[int]) -> str:
        return f"{self.prefix}/{key}/{hashlib.blake2b(repr([*ranks]).encode(), digest_size=8).hexdigest()}"

    def _wait(
        self,
        names: dict[int, str],
        over: Callable[[], bool],
        first: int,
        given_up: str,
        before: bytes,
        timeout: float | None,
        mine: bytes = b"-",
    ) -> None:
        """Wait until `over()`.

        Args:
            names: by rank, the entries that the ranks write, to name missing ranks.
            over: returns whether the wait is over.
            first: rank that completes the round when all have come.
            given_up: entry that tells that a rank has given up this wait.
            before: value of that entry before the wait; b"" without one.
            timeout: seconds to wait; None: the timeout of this rendezvous.
            mine: value for that entry, if this rank gives up.
        """
        clock, warned, looked = AwakeClock(2 * _LOOK_S), False, 0.0
        most = self._timeout if timeout is None else timeout
        while not over():
            waited = clock.now()
            if waited < min(looked + _LOOK_S, most):
                time.sleep(min(_NAP_S, waited / 8))
                continue
            looked = waited
            late = waited > most or (
                self._store.check([given_up]) and not (before and bytes(self._store.get(given_up)) == before)
            )
            if not late and (warned or waited <= self._warning):
                continue
            missing = [rank for rank, name in names.items() if not self._store.check([name])]
            if over():
                break
            if missing:
                text = f"waits for {rank_list(missing)} to call init()"
            else:
                missing = [first]
                text = f"waits for rank {missing[0]}, which has come to init() and does not go on"
            if late:
                self._store.set(given_up, mine)
                time.sleep(2 * _LOOK_S)  # the store may end with this process; the others need time to read the entry
                limit = f" ({self._limit})" if timeout is None else ""
                raise Timeout(f"rank {self._rank} {text}, for more than {most:g} s{limit}", "init", missing)
            warned = True
            _log.warning("stalled: rank %d %s, for %.0f s", self._rank, text, waited, extra={"rank": self._rank})

    def _signature(self, name: str, value: bytes) -> bytes:
        if not self._token:
            return b""
        return hmac.digest(self._token, name.encode() + b"\0" + value, hashlib.sha256)

    def _checked(self, rank: int, name: str, signed: bytes) -> bytes:
        length = len(self._signature(name, b""))
        signature, value = signed[:length], signed[length:]
        if not hmac.compare_digest(signature, self._signature(name, value)):
            raise TransportError(
                f"the value of rank {rank} in the store is not signed with this rank's SORDINO_TOKEN: the rank has "
                "another token, or another process has written the value"
            )
        return value


@contextmanager
def store_answers() -> Iterator[None]:
    """Raise TransportError for an error of the store within the block."""
    try:
        yield
    except RuntimeError as error:  # torch raises this for errors of stores
        if isinstance(error, (Timeout, TransportError)):
            raise
        raise does_not_answer(error) from error


def does_not_answer(error: Exception) -> TransportError:
    """Return the error that stands for an error of a store."""
    return TransportError(f"the store at which the ranks meet does not answer: {_first_line(error)}")


def open_store(address: tuple[str, int], hosts: bool, timeout: float) -> Any:
    """Return the store at an address.

    Args:
        address: host and port.
        hosts: whether this process opens the store, unless it has done so before.
        timeout: seconds to wait for the store.

    Raises:
        TransportError: the store does not answer, or the port is taken.
    """
    if address not in _opened:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        host, port = address
        try:
            _opened[address] = TCPStore(
                host, port, is_master=hosts, timeout=timedelta(seconds=timeout), wait_for_workers=False,
                multi_tenant=True,
            )  # fmt: skip
        except RuntimeError as error:
            what = "cannot be opened" if hosts else "does not answer"
            raise TransportError(
                f"the store at {host}:{port} (MASTER_ADDR, MASTER_PORT), where the ranks meet, {what}: "
                f"{_first_line(error)}"
            ) from error
    return _opened[address]


def _joined(values: Sequence[bytes]) -> bytes:
    return b"".join(len(value).to_bytes(8, "little") + value for value in values)


def _divided(joined: bytes, count: int) -> list[bytes]:
    values: list[bytes] = []
    at = 0
    while at + 8 <= len(joined) and len(values) < count:
        end = at + 8 + int.from_bytes(joined[at : at + 8], "little")
        values.append(joined[at + 8 : end])
        at = end
    if len(values) != count or at != len(joined):
        raise TransportError(f"the ranks have met, but the store does not hold the values of {count} ranks")
    return values


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
