"""Parameters that are on their way from their owners when `step()` has returned: whoever uses one waits for its bucket.

So the gather hides behind whatever comes between two steps, and that of the later layers behind the earlier layers'
forward pass. Nobody sees a parameter that is half of this step and half of the one before: one of which somebody has
taken out a view is waited for in `step()`.
"""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from sordino._core import Handle
from sordino.algorithms.local_sgd.sharding import ShardedReducer
from sordino.errors import SordinoError
from sordino.runtime.deferred_step import watch_modules
from sordino.runtime.devices import on_stream, stream_of
from sordino.runtime.guard import Guard


class Gathering:
    """Gathers the parameters of a group while others do something else.

    Args:
        reducer: whose parameters they are.
    """

    def __init__(self, reducer: ShardedReducer) -> None:
        self._reducer = reducer
        self._under_way: dict[str, tuple[Guard, Handle]] = {}  # by bucket
        self._stream: torch.cuda.Stream | None = None  # that step() was called on
        self._lock = threading.RLock()  # whoever finds a bucket that somebody waits for waits, too
        watch_modules()
        reducer.context.on_shutdown[id(self)] = weakref.WeakMethod(self._before_shutdown)
        _all.add(self)

    @property
    def under_way(self) -> list[str]:
        """The buckets that nobody has waited for."""
        return list(self._under_way)

    def start(self) -> None:
        """Start the gather of all parameters: first of those that backward reaches last, for forward uses them first.

        Wait for those of which somebody has a view.
        """
        self._stream = stream_of(self._reducer.parameters[0].device)
        shards = dict(reversed(self._reducer.shards.items()))
        visible = [name for name, one in shards.items() if one.taken_out]
        with self._lock:
            for name, one in shards.items():
                guard = Guard(partial(self._complete_for, name), values_only=True)
                guard.put_on(self._reducer.parameters[i] for i in one.members)
                try:
                    self._under_way[name] = guard, self._reducer.give(name, "values")
                except BaseException:
                    guard.take_off()
                    raise
        for name in visible:
            self.complete_bucket(name)

    def _complete_for(self, name: str, _: Any) -> None:
        self.complete_bucket(name)

    def complete_bucket(self, name: str) -> None:
        """Wait until the parameters of a bucket are there, if they are on their way.

        A failure is that of all buckets, and is raised once.
        """
        with self._lock, on_stream(self._stream):
            if name not in self._under_way:
                return
            guard, handle = self._under_way[name]
            try:
                handle.wait()
            except SordinoError:
                self.give_up()
                raise
            del self._under_way[name]
            guard.take_off()

    def complete(self) -> None:
        """Wait until all parameters are there."""
        for name in self.under_way:
            self.complete_bucket(name)

    def give_up(self) -> None:
        """Let go of parameters whose gather has failed: they are in part those of before."""
        with self._lock:
            for guard, handle in self._under_way.values():
                with suppress(SordinoError):
                    handle.wait()
                guard.take_off()
            self._under_way = {}

    def _before_shutdown(self) -> None:
        if self._reducer.context.world.failed:
            self.give_up()
        else:
            self.complete()

    def close(self) -> None:
        """Wait until all parameters are there, for the last time."""
        self.complete()
        self._reducer.context.on_shutdown.pop(id(self), None)


_all: weakref.WeakSet[Gathering] = weakref.WeakSet()


def _complete_all() -> None:
    for gathering in list(_all):
        gathering.complete()


# A child has copies of the parameters, and no rank that could wait for them.
os.register_at_fork(before=_complete_all)
