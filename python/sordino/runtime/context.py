"""Context: one rank's view of one world, with its rank, its process sets and its pending operations.

Everything below `sordino.torch` takes a context as an argument. `sordino.torch` itself uses the current one: the
default made by `init()` or, inside `use()`, that of this thread, so that many ranks can live in one process.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from sordino._core import Device, Handle, World
from sordino.errors import PeerLost, UsageError
from sordino.log import NO_RANK, find_rank_by
from sordino.log.core import flush
from sordino.runtime.dtypes import DTYPE_CODES
from sordino.runtime.versions import note_change

if TYPE_CHECKING:
    from sordino.runtime.recorder import Recorder


def _not(*_: object) -> bool:
    """Decline an all-reduce, which then takes the normal path."""
    return False


@dataclass
class Pending:
    """An operation that `synchronize()` can wait for."""

    handle: Handle
    finish: Callable[[Handle], Any]
    epoch: int  # of the context at the start
    name: tuple[int, str]  # process set and name, reserved until the operation has been waited for


@dataclass
class Lockstep:
    """A sequence of parts that some ranks execute together, in the same order (see `sordino.runtime.recovery`).

    Attributes:
        key: name, the same on all ranks.
        identities: identities of the ranks (their numbers in the first world).
        begun: number of the part in progress, or of the last one.
        arrived: the last part whose results this rank has.
        committed: the last part whose results all ranks are known to have.
        through: the last complete part, as determined by the remaining ranks after a loss.
        undo: restores the state of this rank before the part in progress.
    """

    key: str
    identities: list[int]
    begun: int = 0
    arrived: int = 0
    committed: int = 0
    through: int = 0
    undo: Callable[[], None] = field(default=lambda: None, repr=False)
    _working: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @contextmanager
    def next(self, undo: Callable[[], None]) -> Iterator[int]:
        """Yield the number of the next part, which the block executes. If the block raises, the part is not counted.

        Raises:
            UsageError: another thread of this rank executes a part.
        """
        if not self._working.acquire(blocking=False):
            raise UsageError(
                f"another thread of this rank is in the middle of a blocking operation ({self.key}): where ranks go on "
                "without those that are lost, all must take their operations in one order, so call them from one thread"
            )
        try:
            self.begun += 1
            self.undo = undo
            yield self.begun
        except BaseException:
            self.begun -= 1
            raise
        finally:
            self._working.release()


@dataclass
class Recoverable:
    """An object that is renewed when the remaining ranks meet after a loss.

    Attributes:
        renew: weak method that renews the object, if all of its ranks still have it.
        give_up: weak method that undoes what the loss has interrupted, if some of its ranks no longer have the object.
        name: name, the same on all ranks that renew it together; "" if each rank renews it alone.
        process_set: the ranks that have the object.
    """

    renew: Callable[[], Callable[[], None] | None]
    give_up: Callable[[], Callable[[], None] | None]
    name: str = ""
    process_set: Any = None


@dataclass
class Resized:
    """A callback for changes of the number of ranks, and the last number of ranks that it knows."""

    callback: Callable[[int, int], None]
    size: int


@dataclass
class Context:
    """One rank of one world. `rank` and `size` count all ranks; the other numbers follow from the ranks' nodes."""

    world: World
    pending: dict[int, Pending] = field(default_factory=dict)
    # Reserved names, with the ticket of the pending operation, until its end has been observed.
    taken: dict[tuple[int, str], int] = field(default_factory=dict)
    # Agreements in which this rank must take part before it joins, because others need them later. Weak methods.
    on_join: dict[int, Callable[[], Callable[[], None] | None]] = field(default_factory=dict)
    _last_ticket: int = 0
    _unnamed: Counter[tuple[str, str]] = field(default_factory=Counter)
    _plans: Counter[tuple[str, str]] = field(default_factory=Counter)
    process_sets: list[Any] = field(default_factory=list)  # registered by the user
    members_of: dict[int, list[int]] = field(default_factory=dict)  # identities of their members, by id()
    # Sets of the core that only the library uses: for the exchanges of a process set (`channels`), and for its groups
    # by their key (`groups`: id and members). For the exchanges of one object: the number of exchanges begun on each
    # set (`exchanges`), and the sets that no object on this rank uses any more (`idle_channels`, by the number of the
    # parent and the ranks).
    channels: dict[int, int] = field(default_factory=dict)
    exchanges: Counter[int] = field(default_factory=Counter)
    idle_channels: dict[tuple[int, tuple[int, ...]], set[int]] = field(default_factory=dict)
    groups: dict[tuple[int, str, int], tuple[int, list[int]]] = field(default_factory=dict)
    # Complete postponed work; called before this rank leaves. Weak methods.
    on_shutdown: dict[int, Callable[[], Callable[[], None] | None]] = field(default_factory=dict)
    # Release the user's parameters; called after this rank has left. Weak methods.
    on_end: dict[int, Callable[[], Callable[[], None] | None]] = field(default_factory=dict)
    # Take part in work of other ranks from this rank's join until all have joined. Weak methods.
    while_joined: dict[int, Callable[[], Callable[[], None] | None]] = field(default_factory=dict)
    arguments: dict[str, Any] | None = None  # of `init()`, if it made this context
    services: int = 0  # first free number of a service of the core
    pretended: Device | None = None  # device that CPU tensors are treated as memory of, in tests without a GPU
    helpers: Any = None  # sordino.runtime.helpers.Helpers, if some ranks only help
    recorder: Recorder | None = None  # writes the run record of this rank
    # For recovery from losses: sequences of parts, objects to renew (in the order of registration), and callbacks for
    # changes of the number of ranks.
    locksteps: dict[str, Lockstep] = field(default_factory=dict)
    recoverables: dict[int, Recoverable] = field(default_factory=dict)
    on_resize: list[Resized] = field(default_factory=list)
    recovering: threading.RLock = field(default_factory=threading.RLock)
    fruitless: int = 0  # number of successive recoveries without a lost rank
    _plain: threading.local = field(default_factory=threading.local)
    _names: str = ""
    _counting: threading.Lock = field(default_factory=threading.Lock)
    _joins: int = 0

    def __post_init__(self) -> None:
        self._take_place()
        self.started = self.size  # number of ranks of the first world

    def _take_place(self) -> None:
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
        self.epoch = self.world.epoch
        self.outlasts = self.world.outlasts
        # If ranks survive losses, operations are repeated after a loss, which the ranks must agree on. The fast path of
        # small all-reduces does not do that.
        self.allreduce_again = (
            _not if self.outlasts else self.world.allreduce_again(torch.Tensor, DTYPE_CODES, note_change)
        )
        self.identity = self.world.identities[self.rank]
        """Number of this rank in the first world. It never changes."""

    def adopt(self, world: World) -> None:
        """Continue in another world with some of the ranks. Objects of the old world must be made again."""
        self.world = world
        self.channels.clear()
        self.exchanges.clear()
        self.idle_channels.clear()
        self.groups.clear()
        self.services = 0
        self._take_place()

    def lockstep(self, key: str, process_set: Any) -> Lockstep:
        """Return the sequence of parts with this name of a process set. It stays the same after losses."""
        name = self.lasting_name(key, process_set)
        identities = [self.world.identities[rank] for rank in process_set.ranks or []]
        return self.locksteps.setdefault(name, Lockstep(name, identities))

    def living_recoverables(self) -> list[Recoverable]:
        """Return the objects to renew after a loss that still exist."""
        self.recoverables = {key: one for key, one in self.recoverables.items() if one.renew() is not None}
        return list(self.recoverables.values())

    @contextmanager
    def plainly(self) -> Iterator[None]:
        """Make this thread's operations raise within the block when a rank is lost.

        The caller repeats them.
        """
        before = self.is_plain
        self._plain.on = True
        try:
            yield
        finally:
            self._plain.on = before

    @property
    def is_plain(self) -> bool:
        return not self.outlasts or getattr(self._plain, "on", False)

    def shutdown(self, cause: str = "") -> None:
        """Complete postponed work, and leave the world. Raises the first error of the postponed work after leaving.

        Args:
            cause: error because of which this rank leaves, which is sent to the other ranks; "" without an error.
        """
        failures: list[Exception] = []
        for alive in [method() for method in self.on_shutdown.values()]:
            try:
                if alive is not None:
                    alive()
            except Exception as error:
                failures.append(error)
        self.world.shutdown(cause)
        if self.helpers is not None:
            self.helpers.context.world.shutdown(cause)
        for alive in [method() for method in self.on_end.values()]:
            if alive is not None:
                alive()
        if self.recorder is not None:
            self.recorder.close()
        flush()
        if failures:
            raise failures[0]

    def returned(self) -> None:
        """Note the end of a call for communication, for the run record."""
        if self.recorder is not None:
            self.recorder.asked()

    def abort(self, cause: str) -> None:
        """Tell all other ranks that this rank is about to end because of `cause`."""
        self.world.abort(cause)
        if self.helpers is not None:
            self.helpers.context.world.abort(cause)

    def track(self, handle: Handle, finish: Callable[[Handle], Any], name: tuple[int, str]) -> int:
        """Register an operation and return its handle for `poll` and `synchronize`."""
        with self._counting:
            self._last_ticket += 1
            ticket = self._last_ticket
        self.pending[ticket] = Pending(handle, finish, self.epoch, name)
        self.taken[name] = ticket
        return ticket

    def free_name(self, ticket: int, name: tuple[int, str]) -> None:
        """Release the name of an operation that has ended, unless another operation has it already."""
        if self.taken.get(name) == ticket:
            del self.taken[name]

    def has_given(self, ticket: object) -> bool:
        """Return whether `track` has ever returned this number."""
        return type(ticket) is int and 0 < ticket <= self._last_ticket

    def operation_name(self, label: str, name: str | None, process_set: int) -> str:
        """Return the name by which ranks match an operation.

        Unnamed operations are counted by kind and process set, so the counts of ranks outside of a set agree, too.
        """
        if name is None:
            return f"{label}.noname.{self._joins}.{self._next(self._unnamed, process_set, label)}"
        return f"{label}.{name}"

    def plan_name(self, key: str, process_set: int | None) -> str:
        """Return a new name with this key: the n-th call in a process set returns the same name on all its members."""
        return f"{self._names}{key}.{self._next(self._plans, process_set or 0, key)}"

    def _next(self, counter: Counter[tuple[str, str]], process_set: int, key: str) -> int:
        with self._counting:  # backward names and starts operations on another thread
            place = (self._lasting_name(process_set), key)
            counter[place] += 1
            return counter[place] - 1

    def lasting_name(self, key: str, process_set: Any) -> str:
        """Return a name for a process set's object that stays the same after losses."""
        return f"{self._lasting_name(process_set.process_set_id or 0)}.{key}"

    def _lasting_name(self, process_set: int) -> str:
        """Return the key of a process set in counters.

        The set of all ranks and sets of users keep their key in the next world; other sets do not.
        """
        if process_set == 0:
            return "all"
        for place, known in enumerate(self.process_sets):
            if known.process_set_id == process_set:
                return f"user's {place}"
        return f"{self.epoch}.{process_set}"

    @contextmanager
    def names_of_epoch(self) -> Iterator[None]:
        """Give plans and operations within the block names that contain the epoch.

        The remaining ranks may be at different places in their programs, so their counters may differ.
        """
        before = self._plans, self._unnamed, self._names
        self._plans, self._unnamed, self._names = Counter(), Counter(), f"epoch {self.epoch}."
        try:
            yield
        finally:
            self._plans, self._unnamed, self._names = before

    def names_until_now(self) -> Callable[[], None]:
        """Return a function that resets the counters of names to now, for work that is repeated."""
        plans, unnamed = self._plans.copy(), self._unnamed.copy()

        def go_back() -> None:
            self._plans, self._unnamed = plans.copy(), unnamed.copy()

        return go_back

    def rank_of(self, identity: int, what: str) -> int:
        """Return the current rank of `identity`. Raises PeerLost with the description `what` if it is lost."""
        if identity not in self.world.identities:
            raise PeerLost(f"{what} is lost")
        return self.world.identities.index(identity)

    def joined(self) -> None:
        """Note that all ranks have joined. Resets the counts of unnamed operations, which may differ between ranks."""
        self._joins += 1
        self._unnamed.clear()


class _Local(threading.local):
    context: Context | None = None


_local = _Local()
_default: Context | None = None
_no_rank = ""


def current() -> Context:
    """Return the current context. Raises `UsageError` (a ValueError, as in Horovod) before `init()`."""
    context = _local.context or _default
    if context is None:
        raise UsageError(_no_rank or "Sordino has not been initialized; call sordino.torch.init() first.")
    return context


def is_no_rank(why: str) -> None:
    """Note that `init()` has not made this process a rank. `current()` raises UsageError with the text `why`."""
    global _no_rank
    _no_rank = why


def current_or_none() -> Context | None:
    """Return the current context; None before `init()`."""
    return _local.context or _default


def _current_rank() -> int:
    context = current_or_none()
    return NO_RANK if context is None else context.rank


find_rank_by(_current_rank)


def set_default(context: Context | None) -> None:
    """Set the context of threads that are not inside `use()`. None removes it."""
    global _default
    _default = context


@contextmanager
def use(context: Context) -> Iterator[Context]:
    """Make `context` the current one for this thread."""
    previous, _local.context = _local.context, context
    try:
        yield context
    finally:
        _local.context = previous


def replace_current(context: Context | None) -> None:
    """Replace the current context for `init()` and `shutdown()`: inside `use()` the thread's, else the default."""
    if _local.context is not None:
        _local.context = context
    else:
        set_default(context)


def members_of(context: Context, process_set: Any) -> tuple[int, ...]:
    """Return the identities of a process set's members; () if the set is not registered."""
    if process_set.process_set_id is None:
        return ()
    return tuple(context.world.identities[rank] for rank in process_set.ranks or [])
