"""A context is one rank's view of one world: who it is, its process sets, and its operations under way.

Everything below `sordino.torch` takes a context as an argument. `sordino.torch` itself uses the current one: the
default that `init()` makes, or, inside `use()`, the one of this thread (so many ranks can live in one process).
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sordino._core import Device, Handle, World
from sordino.errors import UsageError


@dataclass
class Pending:
    """An operation that `synchronize()` can wait for, and what to make of its end."""

    handle: Handle
    finish: Callable[[Handle], Any]


@dataclass
class Context:
    """One rank of one world. `rank` and `size` count all ranks; the rest is derived from which node each lives on."""

    world: World
    pending: dict[int, Pending] = field(default_factory=dict)
    # Agreements that this rank must take part in before it joins, for others will ask for them later. Weak methods.
    on_join: dict[int, Callable[[], Callable[[], None] | None]] = field(default_factory=dict)
    _tickets: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _unnamed: dict[tuple[int, str], Iterator[int]] = field(default_factory=lambda: defaultdict(itertools.count))
    _plans: dict[tuple[int, str], Iterator[int]] = field(default_factory=lambda: defaultdict(itertools.count))
    process_sets: list[Any] = field(default_factory=list)  # that the user has registered
    # Sets of the core that only the library uses: for the exchanges of a process set, and for its groups by their size
    # (id and members).
    channels: dict[int, int] = field(default_factory=dict)
    groups: dict[tuple[int, str, int], tuple[int, list[int]]] = field(default_factory=dict)
    # What completes things that this rank has put off; called before it leaves. Weak methods.
    on_shutdown: dict[int, Callable[[], Callable[[], None] | None]] = field(default_factory=dict)
    # What this rank does for the others while it has joined and they have not, until all have. Weak methods.
    while_joined: dict[int, Callable[[], Callable[[], None] | None]] = field(default_factory=dict)
    services: int = 0  # numbers of the core's services up to this one are taken
    pretended: Device | None = None  # whose memory the CPU's tensors are taken to be, where tests have no GPU
    helpers: Any = None  # sordino.torch.helpers.Helpers, where some ranks have no model and help the others
    _joins: int = 0

    def __post_init__(self) -> None:
        nodes = self.world.nodes
        self.rank = self.world.rank
        self.size = self.world.size
        here = [rank for rank in range(self.size) if nodes[rank] == nodes[self.rank]]
        self.local_rank = here.index(self.rank)
        self.local_size = len(here)
        # Horovod's meaning: the nodes that have a rank with this local rank, in order.
        sizes = [nodes.count(node) for node in sorted(set(nodes))]
        order = [node for node, size in zip(sorted(set(nodes)), sizes) if size > self.local_rank]
        self.cross_rank = order.index(nodes[self.rank])
        self.cross_size = len(order)
        self.is_homogeneous = len(set(sizes)) == 1

    def shutdown(self) -> None:
        """Completes what was put off, and leaves. Raises what went wrong first with the former."""
        failures: list[Exception] = []
        for alive in [method() for method in self.on_shutdown.values()]:
            try:
                if alive is not None:
                    alive()
            except Exception as error:
                failures.append(error)
        self.world.shutdown()
        if self.helpers is not None:
            self.helpers.context.world.shutdown()
        if failures:
            raise failures[0]

    def abort(self, cause: str) -> None:
        """Tells all other ranks that this one is about to end because of `cause`."""
        self.world.abort(cause)
        if self.helpers is not None:
            self.helpers.context.world.abort(cause)

    def track(self, handle: Handle, finish: Callable[[Handle], Any]) -> int:
        """Registers an operation and returns the number that `poll` and `synchronize` know it by."""
        ticket = next(self._tickets)
        self.pending[ticket] = Pending(handle, finish)
        return ticket

    def operation_name(self, label: str, name: str | None, process_set: int) -> str:
        """The name that ranks match an operation by. Unnamed ones are counted for each kind and process set, so a rank
        that is not in a set stays in step."""
        if name is None:
            return f"{label}.noname.{self._joins}.{next(self._unnamed[process_set, label])}"
        return f"{label}.{name}"

    def plan_name(self, key: str, process_set: int | None) -> str:
        """A name for the n-th thing with this key in a process set, the same on all its members."""
        return f"{key}.{next(self._plans[process_set or 0, key])}"

    def joined(self) -> None:
        """All ranks have joined, however many operations each had submitted: unnamed ones are counted anew."""
        self._joins += 1
        self._unnamed.clear()


class _Local(threading.local):
    context: Context | None = None


_local = _Local()
_default: Context | None = None


def current() -> Context:
    """The context in force. Raises `UsageError` (a ValueError, as in Horovod) before `init()`."""
    context = _local.context or _default
    if context is None:
        raise UsageError("Sordino has not been initialized; call sordino.torch.init() first.")
    return context


def current_or_none() -> Context | None:
    return _local.context or _default


def set_default(context: Context | None) -> None:
    global _default
    _default = context


@contextmanager
def use(context: Context) -> Iterator[Context]:
    """Makes `context` the current one for this thread."""
    previous, _local.context = _local.context, context
    try:
        yield context
    finally:
        _local.context = previous


def replace_current(context: Context | None) -> None:
    """What `init()` and `shutdown()` do: inside `use()` they act on the thread's context, else on the default."""
    if _local.context is not None:
        _local.context = context
    else:
        set_default(context)
