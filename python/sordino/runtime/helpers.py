"""Ranks that have no model and help workers: the communicators of `Layered`, the servers of `ParameterSkipping`.

There are two worlds: one of the workers alone, which users see, and one of everybody, where gradients or parameters
travel. In that one workers call the helpers by an exchange of one number, and then say what there is to do; what a
helper makes of that is the algorithm's (`Algorithm.open_service`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch

from sordino._core import FromOwner, Layout
from sordino.errors import PeerLost, UsageError
from sordino.runtime.context import Context, use
from sordino.runtime.dtypes import DTYPE_CODES
from sordino.runtime.flat_buffer import FlatBuffer
from sordino.runtime.groups import new_channel
from sordino.runtime.objects import broadcast_object
from sordino.runtime.process_set import global_process_set

Opened = TypeVar("Opened")


class Service(Protocol):
    """What a rank without a model does for the others."""

    def serve(self) -> None:
        """Do it until the workers have left, which raises PeerLost."""


class Helped(Protocol):
    """What is asked of an algorithm with helpers; see `sordino.algorithms.base.Algorithm`."""

    def roles(self, nodes: Sequence[int]) -> Any:
        """Return who trains and who helps, of the ranks that live on these nodes."""

    def helped_alike(self, other: Any) -> bool:
        """Return whether the helpers that were made for this algorithm can help the other one."""

    def open_service(self, helpers: Helpers, told: Any) -> Service:
        """Return what a helper serves, of what the workers have told it."""


class Helpers:
    """The world of workers and helpers, as one of its ranks sees it. Collective over all of them.

    Args:
        context: of all ranks.
        algorithm: whose `dedicated` is true.
    """

    def __init__(self, context: Context, algorithm: Helped) -> None:
        self.context, self.algorithm = context, algorithm
        self.roles = algorithm.roles(context.world.nodes)
        with use(context):
            self._call = FlatBuffer(context, Layout([("call", DTYPE_CODES[torch.uint8], (1,))], groups=[0]))
            self._calls = new_channel(context, global_process_set)
            self._calls.compare([self._call])

    def _meet(self, serving: bool) -> None:
        """Wait until workers call. Their first rank is rank 0."""
        self._calls.start("call", FromOwner(self.context.size), self._call, serving=serving).wait()

    def open(self, told: Any, make: Callable[[Any], Opened]) -> Opened:
        """Have the helpers serve something, and return this rank's part of it. Collective over all workers.

        Args:
            told: what the helpers must know of it; pickled.
            make: takes what the first worker has told. Collective over workers and helpers.
        """
        with use(self.context):
            self._meet(serving=False)
            return make(self._tell(told))

    def _tell(self, what: Any) -> Any:
        return broadcast_object(what, root_rank=0, name=self.context.plan_name("helpers.work", 0))

    def _answer(self) -> Service:
        """Return what a helper makes of what workers open."""
        self._meet(serving=True)
        return self.algorithm.open_service(self, self._tell(None))

    def serve(self) -> None:
        """Do what workers call for, until they have left.

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
                        self.context.abort(f"{type(error).__name__}: {error}")

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
    """Return those of this rank's job. UsageError unless `init()` made them for such an algorithm."""
    helpers = context.helpers
    if not isinstance(helpers, Helpers) or not helpers.algorithm.helped_alike(algorithm):
        raise UsageError(f"{algorithm} needs hvd.init(algorithm={algorithm}), which makes the ranks that serve it")
    return helpers
