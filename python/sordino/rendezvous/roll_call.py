"""Roll call: the ranks of one start agree on a name that no other start at the same store has.

A store may outlive a start: torchrun restarts ranks, and scripts make one group after the other. The entries of earlier
starts stay, and ranks cannot count starts, because some may have ended before they reached the store. So each rank
shows a random number, and the name is the hash of all numbers, once all ranks have seen it:

| entry | written by | value |
|---|---|---|
| hello/R | rank R | a random number of this rank and start |
| roll/NUMBER | the first rank, for the number of each rank, and again if one has changed | the hash of all numbers |
| seen/HASH/R | each other rank, when it has read its roll | |
| go/HASH | the first rank, when all others have seen this hash | |
"""

from __future__ import annotations

import hashlib
import secrets
import time
from typing import Any

_LOOK_S = 1.0  # interval at which the first rank reads the numbers again


class RollCall:
    """One rank's part in a roll call.

    Attributes:
        number: random number of this rank.
        name: the hash of all numbers as this rank knows it; final when `over` has returned True.
        awaited: by rank, the entries whose absence tells which ranks are missing.

    Args:
        store: a torch.distributed.Store.
        place: prefix of the entries.
        rank: rank of this process.
        size: number of ranks.
    """

    def __init__(self, store: Any, place: str, rank: int, size: int) -> None:
        self._store, self._place, self._rank, self._size = store, place, rank, size
        self.number = secrets.token_bytes(8)
        self._hello = [f"{place}/hello/{one}" for one in range(size)]
        self.awaited = dict(enumerate(self._hello))
        self._roll = b""
        self._looked = -_LOOK_S

    @property
    def name(self) -> str:
        return self._roll.hex()

    def begin(self) -> None:
        """Show this rank's number."""
        self._store.set(self._hello[self._rank], self.number)

    def over(self) -> bool:
        """Do what this rank can do now. Return whether the name is final."""
        return self._leads() if self._rank == 0 else self._follows()

    def _leads(self) -> bool:
        if not self._store.check(self._hello):
            return False
        if time.monotonic() - self._looked >= _LOOK_S:
            self._write_roll()
        if self.awaited and not self._store.check(list(self.awaited.values())):
            return False
        before = self._roll
        self._write_roll()  # a rank that has seen the roll may have been started again since
        if self._roll != before:
            return False
        self._store.set(self._go(), b"")
        return True

    def _follows(self) -> bool:
        if self._roll and self._store.check([self._go()]):
            return True  # checked before the roll, because the first rank may be in its next start
        entry = self._roll_of(self.number)
        if self._store.check([entry]):
            roll = bytes(self._store.get(entry))
            if roll != self._roll:
                self._take(roll)
                self._store.set(self.awaited[self._rank], b"")
        return False

    def _write_roll(self) -> None:
        self._looked = time.monotonic()
        numbers = [bytes(self._store.get(entry)) for entry in self._hello]
        roll = hashlib.blake2b(b"".join(numbers), digest_size=8).digest()
        if roll != self._roll:
            self._take(roll)
            for number in numbers:
                self._store.set(self._roll_of(number), roll)

    def _take(self, roll: bytes) -> None:
        """Take a roll as the present one, which all ranks but the first have to see."""
        self._roll = roll
        self.awaited.clear()  # changed in place: `StoreRendezvous` reads it while it waits
        self.awaited.update({rank: f"{self._place}/seen/{self.name}/{rank}" for rank in range(1, self._size)})

    def _roll_of(self, number: bytes) -> str:
        return f"{self._place}/roll/{number.hex()}"

    def _go(self) -> str:
        return f"{self._place}/go/{self.name}"
