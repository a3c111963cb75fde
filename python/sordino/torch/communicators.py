"""Communicators that are ranks: they have no model, and average whatever their workers tell them to.

There are two worlds: one of the workers alone, which users see, and one of everybody, where gradients travel. In that
one workers call the communicators by an exchange of one number, and then say which segments there are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from sordino._core import FromOwner, Layout
from sordino.algorithms.layered import Layered
from sordino.context import Context, use
from sordino.errors import PeerLost
from sordino.torch.exchanges import Channel
from sordino.torch.functions import broadcast_object
from sordino.torch.groups import new_channel
from sordino.torch.parameters import FlatValues
from sordino.torch.process_sets import global_process_set
from sordino.torch.routes import Route, SegmentSpec
from sordino.torch.tensors import DTYPE_CODES


class Layers:
    """The world of workers and communicators, as one of its ranks sees it. Collective over all of them.

    Args:
        context: of all ranks.
        algorithm: with communicator="rank".
    """

    def __init__(self, context: Context, algorithm: Layered) -> None:
        self.context, self.algorithm = context, algorithm
        self.roles = algorithm.roles(context.world.nodes)
        with use(context):
            self._call = FlatValues(context, Layout([("call", DTYPE_CODES[torch.uint8], (1,))], groups=[0]))
            self._calls = Channel(context, global_process_set, new_channel(context, global_process_set))
            self._calls.compare([self._call])

    def _meet(self, serving: bool) -> None:
        """Waits until workers call. Their first rank is rank 0."""
        self._calls.start("call", FromOwner(self.context.size), self._call, serving=serving).wait()

    def open(self, specs: Sequence[SegmentSpec]) -> Route:
        """Makes the way of these segments. Collective over all workers."""
        with use(self.context):
            self._meet(serving=False)
            return self._route(specs)

    def _route(self, specs: Sequence[SegmentSpec] | None) -> Route:
        told = broadcast_object(specs, root_rank=0, name=self.context.plan_name("layered.segments", 0))
        return Route(self.context, global_process_set, self.roles, told)

    def serve(self) -> None:
        """Does what workers call for, until they have left.

        Raises:
            SordinoError: a rank is lost, or something else failed.
        """
        failures: list[Exception] = []
        threads: list[threading.Thread] = []

        def serve_route(route: Route) -> None:
            with use(self.context):
                try:
                    self._until_they_leave(route.serve)
                except Exception as error:
                    failures.append(error)
                    if not self.context.world.failed:
                        self.context.abort(f"{type(error).__name__}: {error}")

        def answer() -> None:
            while True:
                self._meet(serving=True)
                threads.append(threading.Thread(target=serve_route, args=(self._route(None),), daemon=True))
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
