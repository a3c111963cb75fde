"""All-gather of parameters that continues after `step()` has returned. Using a parameter waits for its bucket.

So the gather hides behind the work between two steps, and the gather of later layers behind the forward pass of earlier
layers. No code sees a parameter that is partly from this step and partly from the one before. Uses of an existing view
of a parameter cannot be noticed, so `step()` waits for that parameter.
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
from sordino.runtime.devices import on_stream, stream_of
from sordino.runtime.gradients.deferred_step import watch_modules
from sordino.runtime.gradients.guard import Guard


class Gathering:
    """Gather of the parameters of a group in the background.

    Args:
        reducer: the reducer that holds the parameters.
    """

    def __init__(self, reducer: ShardedReducer) -> None:
        self._reducer = reducer
        self._under_way: dict[str, tuple[Guard, Handle]] = {}  # by bucket
        self._stream: torch.cuda.Stream | None = None  # the stream on which step() was called
        self._lock = threading.RLock()  # makes a thread wait while another one waits for the same bucket
        watch_modules()
        reducer.context.callbacks.on_shutdown.add(self._before_shutdown)
        _all.add(self)

    @property
    def under_way(self) -> list[str]:
        """The buckets that no thread has waited for yet."""
        return list(self._under_way)

    def start(self) -> None:
        """Start the gather of all parameters, and wait for the buckets of which a view exists.

        Buckets that backward reaches last are sent first, because forward uses them first.
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
        """Wait until the parameters of a bucket have been gathered, if it is in flight.

        A failure ends the gather of all buckets, and is raised once.
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
        """Wait until all parameters have been gathered."""
        for name in self.under_way:
            self.complete_bucket(name)

    def give_up(self) -> None:
        """Release the parameters after a failed gather. Some of them have the values from before the step."""
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
        """Wait until all parameters have been gathered, and end the registration for shutdown."""
        self.complete()
        self._reducer.context.callbacks.on_shutdown.discard(self)


_all: weakref.WeakSet[Gathering] = weakref.WeakSet()


def _complete_all() -> None:
    for gathering in list(_all):
        gathering.complete()


# A forked child has copies of the parameters, but no rank that could wait for them.
os.register_at_fork(before=_complete_all)
