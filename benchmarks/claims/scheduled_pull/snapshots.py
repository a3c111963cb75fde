"""Snapshots on each rank, and computation, for the parts of scheduled_pull.py that measure single pulls."""

from __future__ import annotations

import time
from collections import deque

import torch

import sordino.torch as hvd
from sordino._core import Mailbox, SnapshotStore
from sordino.errors import SordinoError, Timeout
from sordino.runtime.context import current
from sordino.runtime.exchange.async_agent import service_numbers
from sordino.runtime.exchange.flat_buffer import ParameterBuffer

PATIENCE = 60.0  # longest wait, in seconds


class Snapshots:
    """Snapshots of `values`, of `count` bytes, on every rank. Creating and closing them is collective."""

    def __init__(self, count: int) -> None:
        context = current()
        self.values = torch.full((count // 4,), hvd.rank() + 1.0)
        self._arena = ParameterBuffer(context, ["values"], [self.values], "model")
        self._arena.adopt()
        number = service_numbers(context, hvd.global_process_set, 2)
        self._mailbox = Mailbox(context.world, number)
        self.store = SnapshotStore(context.world, number + 1, self._arena.layout, self._mailbox)
        self._heard: deque[str] = deque()
        self._ended: dict[int, str] = {}  # errors of pulls that have ended, by number; empty if the pull succeeded
        self._steps = 0
        self.publish()
        for rank, place in enumerate(hvd.allgather_object(self.store.location, name="bench.snapshots")):
            if context.world.nodes[rank] == context.world.nodes[context.rank]:
                self.store.connect(rank, place)

    def publish(self) -> None:
        """Publish a snapshot of `values`."""
        self._steps += 1
        self.store.publish(self._arena.address, self._steps)

    def pull(self, peer: int) -> float:
        """Pull a snapshot of another rank; return the seconds until this rank knows that its bytes have arrived.

        Raises:
            SordinoError: the pull failed.
        """
        begin = time.perf_counter()
        pull = self.store.pull(peer, time.monotonic())
        while pull.number not in self._ended:
            self._listen(begin + PATIENCE, f"a pull from rank {peer}")
        seconds, failure = time.perf_counter() - begin, self._ended.pop(pull.number)
        if failure:
            raise SordinoError(f"a pull from rank {peer} failed: {failure}")
        self.store.discard(pull)
        return seconds

    def tell(self, rank: int, text: str) -> None:
        """Send a message to a rank, without waiting."""
        self._mailbox.send(rank, text)

    def heard(self) -> str | None:
        """Return the next message, or None if there is none yet."""
        self._take(0.0)
        return self._heard.popleft() if self._heard else None

    def hear(self) -> str:
        """Wait for the next message and return it."""
        until = time.perf_counter() + PATIENCE
        while not self._heard:
            self._listen(until, "a message")
        return self._heard.popleft()

    def close(self) -> None:
        """Close the mailbox and the store. Collective."""
        hvd.barrier()
        self._mailbox.close()
        self.store.close()

    def _listen(self, until: float, what: str) -> None:
        left = until - time.perf_counter()
        if left <= 0:
            raise Timeout(f"{what} has not come within {PATIENCE:g} s")
        self._take(left)

    def _take(self, seconds: float) -> None:
        for event, _, text, number in self._mailbox.wait(seconds):
            if event == "message":
                self._heard.append(text)
            elif event == "done":
                self._ended[number] = text
            elif event in ("end", "lost"):
                raise SordinoError("the other rank is gone")


class Computation:
    """Products of matrices on one core, in pieces of about a millisecond."""

    def __init__(self) -> None:
        self._left, self._right = torch.rand(256, 256), torch.rand(256, 256)
        self._product = torch.empty(256, 256)

    def piece(self) -> None:
        """Compute one piece."""
        for _ in range(2):
            torch.mm(self._left, self._right, out=self._product)
