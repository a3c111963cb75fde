"""Ranks that have no model and help workers: the communicators of `Layered`, the servers of `ParameterSkipping`.

There are two worlds: one of the workers alone, which users see, and one of everybody, where gradients or parameters
travel. In that one workers call the helpers by an exchange of one number, and then say what there is to do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sordino._core import FromOwner, Layout
from sordino.algorithms import Algorithm, Layered, ParameterSkipping, resolve
from sordino.algorithms.layered import Roles
from sordino.context import Context, use
from sordino.errors import PeerLost, UsageError
from sordino.torch.devices import HOST
from sordino.torch.functions import broadcast_object
from sordino.torch.groups import new_channel
from sordino.torch.items import Items
from sordino.torch.parameter_server import ParameterServer
from sordino.torch.parameters import FlatValues, ParameterArena
from sordino.torch.process_sets import global_process_set
from sordino.torch.routes import Route, SegmentSpec
from sordino.torch.tensors import DTYPE_CODES

Helped = Layered | ParameterSkipping


def helped(algorithm: Algorithm | str | None) -> Helped | None:
    """The algorithm if it gives some ranks no model, else None. UsageError if there is no such algorithm."""
    chosen = resolve(algorithm)
    return chosen if isinstance(chosen, (Layered, ParameterSkipping)) and chosen.dedicated else None


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
            self._call = FlatValues(context, Layout([("call", DTYPE_CODES[torch.uint8], (1,))], groups=[0]))
            self._calls = new_channel(context, global_process_set)
            self._calls.compare([self._call])

    def _fit(self, algorithm: Algorithm) -> bool:
        """Whether they are those that an algorithm needs."""
        mine = self.algorithm
        if isinstance(mine, Layered):
            return isinstance(algorithm, Layered) and algorithm.group_size == mine.group_size
        return isinstance(algorithm, ParameterSkipping) and algorithm.servers == mine.servers

    def _meet(self, serving: bool) -> None:
        """Waits until workers call. Their first rank is rank 0."""
        self._calls.start("call", FromOwner(self.context.size), self._call, serving=serving).wait()

    def open_route(self, specs: Sequence[SegmentSpec], kind: torch.device) -> Route:
        """Makes the way of these segments, which this rank has on such a device, through the communicators. Collective
        over all workers."""
        with use(self.context):
            self._meet(serving=False)
            return self._route(self._tell(specs), kind)

    def open_server(self, items: Items, arena: ParameterArena) -> ParameterServer:
        """Has the servers serve items of an arena. Collective over all workers."""
        with use(self.context):
            self._meet(serving=False)
            self._tell(items.as_lists(arena.layout.bytes))
            return self._server(items, arena)

    def _tell(self, what: Any) -> Any:
        return broadcast_object(what, root_rank=0, name=self.context.plan_name("helpers.work", 0))

    def _route(self, specs: Sequence[SegmentSpec], kind: torch.device = HOST) -> Route:
        assert isinstance(self.roles, Roles)
        return Route(self.context, global_process_set, self.roles, specs, kind)

    def _server(self, items: Items, values: FlatValues) -> ParameterServer:
        assert isinstance(self.algorithm, ParameterSkipping)
        return ParameterServer(self.context, global_process_set, self.algorithm, items, values)

    def _answer(self) -> Route | ParameterServer:
        """What a helper makes of what workers open."""
        self._meet(serving=True)
        told = self._tell(None)
        if isinstance(self.algorithm, Layered):
            return self._route(told)
        items, count = Items.from_lists(told)
        layout = Layout([("parameters", DTYPE_CODES[torch.uint8], (count,))], groups=[0])
        return self._server(items, FlatValues(self.context, layout))

    def serve(self) -> None:
        """Does what workers call for, until they have left.

        Raises:
            SordinoError: a rank is lost, or something else failed.
        """
        failures: list[Exception] = []
        threads: list[threading.Thread] = []

        def work_on(work: Route | ParameterServer) -> None:
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
    """Those of this rank's job. UsageError unless `init()` made them for such an algorithm."""
    helpers = context.helpers
    if not isinstance(helpers, Helpers) or not helpers._fit(algorithm):
        raise UsageError(f"{algorithm} needs hvd.init(algorithm={algorithm}), which makes the ranks that serve it")
    return helpers
