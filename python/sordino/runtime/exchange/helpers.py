"""Helpers: ranks without a model that serve workers (communicators of `Layered`, servers of `CaPS`).

There are two worlds. One has the workers only, and is visible to users. The other has all ranks, and exchanges
gradients or parameters. There, workers call the helpers by an exchange of one number, and then broadcast a description
of the work, from which the algorithm makes a service (`Algorithm.open_service`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch

from sordino._core import FromOwner, Layout
from sordino.errors import PeerLost, UsageError
from sordino.runtime.collectives.objects import broadcast_object
from sordino.runtime.context import Context, use
from sordino.runtime.dtypes import DTYPE_CODES
from sordino.runtime.exchange.flat_buffer import FlatBuffer
from sordino.runtime.exchange.groups import new_channel
from sordino.runtime.process_set import global_process_set

Opened = TypeVar("Opened")


class Service(Protocol):
    """Work of a rank without a model for the other ranks."""

    def serve(self) -> None:
        """Serve until the workers have left, which raises PeerLost."""


class Helped(Protocol):
    """Interface of an algorithm with helpers; see `sordino.algorithms.base.Algorithm`."""

    def roles(self, nodes: Sequence[int]) -> Any:
        """Return which ranks train and which help, given the node of each rank."""

    def helped_alike(self, other: Any) -> bool:
        """Return whether helpers made for this algorithm can serve the other one."""

    def open_service(self, helpers: Helpers, description: Any) -> Service:
        """Return the service of a helper for a description from the workers."""


class Helpers:
    """The world of workers and helpers on one of its ranks. Construction is collective over all of them.

    Args:
        context: context of the world of all ranks.
        algorithm: an algorithm whose `dedicated` is true.
    """

    def __init__(self, context: Context, algorithm: Helped) -> None:
        self.context, self.algorithm = context, algorithm
        self.roles = algorithm.roles(context.world.nodes)
        with use(context):
            self._call = FlatBuffer(context, Layout([("call", DTYPE_CODES[torch.uint8], (1,))], groups=[0]))
            self._calls = new_channel(context, global_process_set)
            self._calls.compare([self._call])

    def _meet(self, serving: bool) -> None:
        """Exchange the call. The first worker, rank 0, sends it."""
        self._calls.start("call", FromOwner(self.context.size), self._call, serving=serving).wait()

    def open(self, description: Any, make: Callable[[Any], Opened]) -> Opened:
        """Start a service of the helpers, and return this worker's part of it. Collective over all workers.

        Args:
            description: description for the helpers, which is pickled. The first worker's description is used.
            make: makes the result from the description. Collective over workers and helpers.
        """
        with use(self.context):
            self._meet(serving=False)
            return make(self._tell(description))

    def _tell(self, what: Any) -> Any:
        return broadcast_object(what, root_rank=0, name=self.context.names.plan("helpers.work", 0))

    def _answer(self) -> Service:
        """Return, on a helper, the service for the next call of the workers."""
        self._meet(serving=True)
        return self.algorithm.open_service(self, self._tell(None))

    def serve(self) -> None:
        """Serve the workers until they have left. Called on helpers only.

        Raises:
            SordinoError: a rank is lost, or something else failed.
        """
        failures: list[Exception] = []
        threads: list[threading.Thread] = []

        def work_on(work: Service) -> None:
            with use(self.context):
                try:
                    self._until_they_leave(work.serve)
                except Exception as error:
                    failures.append(error)
                    if not self.context.world.failed:
                        self.context.abort(error)

        def answer() -> None:
            while True:
                threads.append(threading.Thread(target=work_on, args=(self._answer(),), daemon=True))
                threads[-1].start()

        with use(self.context):
            self._until_they_leave(answer)
            for thread in threads:
                thread.join()
        if failures:
            raise failures[0]

    def _until_they_leave(self, work: Callable[[], None]) -> None:
        try:
            work()
        except PeerLost:
            if self.context.world.failed:
                raise


def helpers_of(context: Context, algorithm: Helped) -> Helpers:
    """Return the helpers of this rank's job. Raises UsageError unless `init()` made them for such an algorithm."""
    helpers = context.helpers
    if not isinstance(helpers, Helpers) or not helpers.algorithm.helped_alike(algorithm):
        raise UsageError(f"{algorithm} needs hvd.init(algorithm={algorithm}), which makes some ranks its helpers")
    return helpers
