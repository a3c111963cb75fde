"""A context is one rank's view of one world: who it is, its process sets, and its operations under way.

Everything below `sordino.torch` takes a context as an argument. `sordino.torch` itself uses the current one: the
default that `init()` makes, or, inside `use()`, the one of this thread (so many ranks can live in one process).
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
    """Leave an all-reduce to the usual way."""
    return False


@dataclass
class Pending:
    """An operation that `synchronize()` can wait for, and what to make of its end."""

    handle: Handle
    finish: Callable[[Handle], Any]
    epoch: int  # of the context, when it began
    name: tuple[int, str]  # with its process set: nothing else may have it before somebody has waited


@dataclass
class Lockstep:
    """What some ranks do together, part by part, in one order (see `sordino.runtime.recovery`).

    Attributes:
        key: names it, on all of them.
        identities: who they are, through all worlds.
        begun: the number of the part under way, or of the last one.
        arrived: the last part whose results this rank has.
        committed: the last part that all are known to have the results of.
        through: the last part that is complete, as the ranks have found when they met after a loss.
        undo: makes this rank as it was before the part under way.
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
        """Yield the number of the next part, which is under way within the block.

        An error that ends the block has been no part.
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
    """What is made again when the ranks meet anew after a loss.

    Attributes:
        renew: makes it again, for what all of its ranks still have; a weak method.
        give_up: undoes what the loss has interrupted, on ranks that have it when others do not any more; a weak method.
        name: of what is made again by all together, the same on all of them; "" if each does it alone.
        process_set: the ranks that have it.
    """

    renew: Callable[[], Callable[[], None] | None]
    give_up: Callable[[], Callable[[], None] | None]
    name: str = ""
    process_set: Any = None


@dataclass
class Resized:
    """Who wants to know of the number of ranks, and the last one it was told of."""

    callback: Callable[[int, int], None]
    size: int


@dataclass
class Context:
    """One rank of one world. `rank` and `size` count all ranks; the rest is derived from which node each lives on."""

    world: World
    pending: dict[int, Pending] = field(default_factory=dict)
    # Names, and by which pending operation; until it is seen to have ended.
    taken: dict[tuple[int, str], int] = field(default_factory=dict)
    # Agreements that this rank must take part in before it joins, for others will ask for them later. Weak methods.
    on_join: dict[int, Callable[[], Callable[[], None] | None]] = field(default_factory=dict)
    _last_ticket: int = 0
    _unnamed: Counter[tuple[str, str]] = field(default_factory=Counter)
    _plans: Counter[tuple[str, str]] = field(default_factory=Counter)
    process_sets: list[Any] = field(default_factory=list)  # that the user has registered
    members_of: dict[int, list[int]] = field(default_factory=dict)  # the identities of their members, by their id()
    # Sets of the core that only the library uses: for the exchanges of a process set, and for its groups by their size
    # (id and members).
    channels: dict[int, int] = field(default_factory=dict)
    # Of sets for the exchanges of one object: those that nobody on this rank has any more, and how many exchanges have
    # begun on each. Their key is the parent's number and the ranks.
    exchanges: Counter[int] = field(default_factory=Counter)
    idle_channels: dict[tuple[int, tuple[int, ...]], set[int]] = field(default_factory=dict)
    groups: dict[tuple[int, str, int], tuple[int, list[int]]] = field(default_factory=dict)
    # What completes things that this rank has put off; called before it leaves. Weak methods.
    on_shutdown: dict[int, Callable[[], Callable[[], None] | None]] = field(default_factory=dict)
    # Called when this rank has left, to let go of the user's parameters. Weak methods.
    on_end: dict[int, Callable[[], Callable[[], None] | None]] = field(default_factory=dict)
    # What this rank does for the others while it has joined and they have not, until all have. Weak methods.
    while_joined: dict[int, Callable[[], Callable[[], None] | None]] = field(default_factory=dict)
    arguments: dict[str, Any] | None = None  # of `init()`, where that has made it
    services: int = 0  # numbers of the core's services up to this one are taken
    pretended: Device | None = None  # whose memory the CPU's tensors are taken to be, where tests have no GPU
    helpers: Any = None  # sordino.runtime.helpers.Helpers, where some ranks have no model and help the others
    recorder: Recorder | None = None  # where this rank's run is written down
    # Where ranks go on without those that are lost: what they do together; what is made again, in the order in which it
    # was registered; and who wants to know of the number of ranks.
    locksteps: dict[str, Lockstep] = field(default_factory=dict)
    recoverables: dict[int, Recoverable] = field(default_factory=dict)
    on_resize: list[Resized] = field(default_factory=list)
    recovering: threading.RLock = field(default_factory=threading.RLock)
    fruitless: int = 0  # times in a row that the ranks have met anew with nobody missing
    _plain: threading.local = field(default_factory=threading.local)
    _names: str = ""
    _counting: threading.Lock = field(default_factory=threading.Lock)
    _joins: int = 0

    def __post_init__(self) -> None:
        self._take_place()
        self.started = self.size  # ranks of the first world

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
        # Where ranks outlive others, what they have begun is repeated after a loss, and they must agree on that.
        self.allreduce_again = (
            _not if self.outlasts else self.world.allreduce_again(torch.Tensor, DTYPE_CODES, note_change)
        )
        self.identity = self.world.identities[self.rank]
        """This rank's number in the first world, which it keeps."""

    def adopt(self, world: World) -> None:
        """Go on in another world, of some of the ranks; what was made in the old one must be made again."""
        self.world = world
        self.channels.clear()
        self.exchanges.clear()
        self.idle_channels.clear()
        self.groups.clear()
        self.services = 0
        self._take_place()

    def lockstep(self, key: str, process_set: Any) -> Lockstep:
        """Return what the ranks of a process set do together under this name, whoever of them is left."""
        name = self.lasting_name(key, process_set)
        identities = [self.world.identities[rank] for rank in process_set.ranks or []]
        return self.locksteps.setdefault(name, Lockstep(name, identities))

    def living_recoverables(self) -> list[Recoverable]:
        """Return what is to be made again after a loss."""
        self.recoverables = {key: one for key, one in self.recoverables.items() if one.renew() is not None}
        return list(self.recoverables.values())

    @contextmanager
    def plainly(self) -> Iterator[None]:
        """Make this thread's operations raise, within the block, when a rank is lost.

        Whoever began them repeats them.
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
        """Complete what was put off, and leave. Raises what went wrong first with the former.

        Args:
            cause: the error that this rank leaves in, which the others are told; "" if it is none.
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
        """Take note that a call for communication returns to whoever has made it."""
        if self.recorder is not None:
            self.recorder.asked()

    def abort(self, cause: str) -> None:
        """Tell all other ranks that this one is about to end because of `cause`."""
        self.world.abort(cause)
        if self.helpers is not None:
            self.helpers.context.world.abort(cause)

    def track(self, handle: Handle, finish: Callable[[Handle], Any], name: tuple[int, str]) -> int:
        """Register an operation and return the number that `poll` and `synchronize` know it by."""
        with self._counting:
            self._last_ticket += 1
            ticket = self._last_ticket
        self.pending[ticket] = Pending(handle, finish, self.epoch, name)
        self.taken[name] = ticket
        return ticket

    def free_name(self, ticket: int, name: tuple[int, str]) -> None:
        """Let another operation have the name of this one, which has ended; if none has it already."""
        if self.taken.get(name) == ticket:
            del self.taken[name]

    def has_given(self, ticket: object) -> bool:
        """Return whether `track` has returned this number, however long ago."""
        return type(ticket) is int and 0 < ticket <= self._last_ticket

    def operation_name(self, label: str, name: str | None, process_set: int) -> str:
        """Return the name that ranks match an operation by.

        Unnamed ones are counted for each kind and process set, so a rank that is not in a set stays in step.
        """
        if name is None:
            return f"{label}.noname.{self._joins}.{self._next(self._unnamed, process_set, label)}"
        return f"{label}.{name}"

    def plan_name(self, key: str, process_set: int | None) -> str:
        """Return a name for the n-th thing with this key in a process set, the same on all its members."""
        return f"{self._names}{key}.{self._next(self._plans, process_set or 0, key)}"

    def _next(self, counter: Counter[tuple[str, str]], process_set: int, key: str) -> int:
        with self._counting:  # backward names and starts operations on a thread of its own
            place = (self._lasting_name(process_set), key)
            counter[place] += 1
            return counter[place] - 1

    def lasting_name(self, key: str, process_set: Any) -> str:
        """Return the name of something of a process set, whoever of its ranks is left."""
        return f"{self._lasting_name(process_set.process_set_id or 0)}.{key}"

    def _lasting_name(self, process_set: int) -> str:
        """Return what a process set is counted by.

        Those of all ranks and of users go on in another world, others do not.
        """
        if process_set == 0:
            return "all"
        for place, known in enumerate(self.process_sets):
            if known.process_set_id == process_set:
                return f"user's {place}"
        return f"{self.epoch}.{process_set}"

    @contextmanager
    def names_of_epoch(self) -> Iterator[None]:
        """Give plans and operations, within the block, names of their own.

        The ranks may have come to different places in their programs.
        """
        before = self._plans, self._unnamed, self._names
        self._plans, self._unnamed, self._names = Counter(), Counter(), f"epoch {self.epoch}."
        try:
            yield
        finally:
            self._plans, self._unnamed, self._names = before

    def names_until_now(self) -> Callable[[], None]:
        """Return what makes names go on from here again.

        It is for those that do once more what they have begun to do.
        """
        plans, unnamed = self._plans.copy(), self._unnamed.copy()

        def go_back() -> None:
            self._plans, self._unnamed = plans.copy(), unnamed.copy()

        return go_back

    def rank_of(self, identity: int, what: str) -> int:
        """Return the rank that was number `identity` of the first world.

        PeerLost, saying `what` it was, if it is lost.
        """
        if identity not in self.world.identities:
            raise PeerLost(f"{what} is lost")
        return self.world.identities.index(identity)

    def joined(self) -> None:
        """Note that all ranks have joined, however many operations each had submitted: count unnamed ones anew."""
        self._joins += 1
        self._unnamed.clear()


class _Local(threading.local):
    context: Context | None = None


_local = _Local()
_default: Context | None = None
_no_rank = ""


def current() -> Context:
    """Return the context in force. Raises `UsageError` (a ValueError, as in Horovod) before `init()`."""
    context = _local.context or _default
    if context is None:
        raise UsageError(_no_rank or "Sordino has not been initialized; call sordino.torch.init() first.")
    return context


def is_no_rank(why: str) -> None:
    """Note that `init()` has not made this process a rank; `current()` raises `why`."""
    global _no_rank
    _no_rank = why


def current_or_none() -> Context | None:
    """Return the context in force; None before `init()`."""
    return _local.context or _default


def _current_rank() -> int:
    context = current_or_none()
    return NO_RANK if context is None else context.rank


find_rank_by(_current_rank)


def set_default(context: Context | None) -> None:
    """Make `context` the one that is in force where a thread has none of its own; None for none."""
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
    """Replace the context as `init()` and `shutdown()` do: inside `use()` the thread's, else the default."""
    if _local.context is not None:
        _local.context = context
    else:
        set_default(context)


def members_of(context: Context, process_set: Any) -> tuple[int, ...]:
    """Return who the members of a process set are, through all worlds; nobody, of one that is not registered."""
    if process_set.process_set_id is None:
        return ()
    return tuple(context.world.identities[rank] for rank in process_set.ranks or [])
