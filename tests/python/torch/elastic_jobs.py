"""Jobs on threads that lose ranks, for tests of `hvd.elastic`. Worlds are real, and each loss makes a smaller one."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch

import sordino.torch as hvd
from sordino._core import sim_worlds
from sordino.runtime.context import Context, current, use

PATIENCE = 60.0  # seconds


class Killed(BaseException):
    """Error that ends a rank that is to be lost; `except Exception` does not catch it."""


class Seat(Context):
    """A rank that continues in the next world when its world has failed."""

    job: Job
    number: int  # in the first world

    def recover(self, error: Exception) -> None:
        if self.world.failed:
            self.job.meet(self)


class Job:
    """Ranks as threads that call `function()`; some of them are lost."""

    def __init__(self, size: int, function: Callable[[], Any]) -> None:
        self.function = function
        self.seats: list[Seat] = []
        for number, world in enumerate(sim_worlds([0] * size)):
            seat = Seat(world)
            seat.job, seat.number = self, number
            self.seats.append(seat)
        self.results: list[Any] = [None] * size
        self.failures: list[BaseException] = []
        self.lost: list[int] = []
        self.optimizers: dict[int, list[weakref.ref[Any]]] = {number: [] for number in range(size)}
        self._at_work = set(range(size))
        self._arrived: list[Seat] = []
        self._generation = 0
        self._change = threading.Condition()

    def run(self) -> list[Any]:
        """Return the result of `function` on each rank, None for lost ranks."""
        threads = [threading.Thread(target=self._body, args=(seat,), daemon=True) for seat in self.seats]
        # `elastic.run` is a function; the function that it calls to continue is in the module of that name.
        with patch.object(sys.modules["sordino.torch.elastic.run"], "go_on_after", Seat.recover):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(2 * PATIENCE)
                assert not thread.is_alive(), "a rank hangs"
        if self.failures:
            raise self.failures[0]
        return self.results

    def _body(self, seat: Seat) -> None:
        with use(seat):
            try:
                self.results[seat.number] = self.function()
            except Killed:
                self.lost.append(seat.number)
                seat.abort("killed")
            except BaseException as error:
                self.failures.append(error)
                seat.abort(str(error))
            with self._change:
                self._at_work.discard(seat.number)
                self._renew()
            if seat.number not in self.lost and not self.failures:
                seat.shutdown()

    def meet(self, seat: Seat) -> None:
        """Wait for all remaining ranks, and let this rank continue in their new world."""
        with self._change:
            generation = self._generation
            self._arrived.append(seat)
            self._renew()
            assert self._change.wait_for(lambda: self._generation > generation or self.failures, PATIENCE), (
                "nobody comes"
            )
            if self.failures:
                raise self.failures[0]
        for found in self.optimizers[seat.number]:
            optimizer = found()
            if optimizer is not None:
                wrapping, old = optimizer._wrapping, optimizer._strategy
                wrapping.strategy = wrapping._make_strategy(compare=True)
                old.detach()

    def _renew(self) -> None:
        if not self._arrived or len(self._arrived) < len(self._at_work):
            return
        self._arrived.sort(key=lambda seat: seat.rank)
        for seat, world in zip(self._arrived, sim_worlds([0] * len(self._arrived))):
            Context.__init__(seat, world)
        self._arrived = []
        self._generation += 1
        self._change.notify_all()


def wrapped(optimizer: torch.optim.Optimizer, **options: Any) -> hvd.DistributedOptimizer:
    """Return a `DistributedOptimizer` that continues in the next world, too."""
    made = hvd.DistributedOptimizer(optimizer, **options)
    seat = current()
    if isinstance(seat, Seat):
        seat.job.optimizers[seat.number].append(weakref.ref(made))
    return made
