"""Context: one rank's view of one world, with its rank, its process sets and its pending operations.

Everything below `sordino.torch` takes a context as an argument. `sordino.torch` itself uses the current one: the
default made by `init()` or, inside `use()`, that of this thread, so that many ranks can live in one process.
"""

from __future__ import annotations

import threading
import traceback
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from sordino._core import Device, World
from sordino.errors import PeerLost, UsageError
from sordino.log import NO_RANK, find_rank_by
from sordino.log.core import flush
from sordino.runtime.callbacks import Callbacks
from sordino.runtime.dtypes import DTYPE_CODES
from sordino.runtime.loss_state import Lockstep, LossState
from sordino.runtime.names import Names
from sordino.runtime.pending import PendingOperations
from sordino.runtime.versions import note_change

if TYPE_CHECKING:
    from sordino.runtime.recorder import Recorder


def text_of(cause: str | BaseException) -> str:
    """Return the last line of an error's traceback: its class and its message. A text is returned unchanged."""
    return cause if isinstance(cause, str) else "".join(traceback.format_exception_only(cause)).strip()


def _decline(*_: object) -> None:
    """Return None. Replaces `Context.repeat` and `Context.message` where Python must execute all operations."""


@dataclass
class InternalSets:
    """Process sets and services of the core in this world that only the library uses.

    Attributes:
        channels: for the exchanges of a process set, by the number of that set.
        groups: for the groups of a process set: number and members, by the number of that set and a key.
        exchanges: number of exchanges begun on each set that is for one object.
        idle: sets that no object on this rank uses any more, by the number of the parent set and the ranks.
        services: first free number of a service of the core.
    """

    channels: dict[int, int] = field(default_factory=dict)
    groups: dict[tuple[int, str, int], tuple[int, list[int]]] = field(default_factory=dict)
    exchanges: Counter[int] = field(default_factory=Counter)
    idle: dict[tuple[int, tuple[int, ...]], set[int]] = field(default_factory=dict)
    services: int = 0


@dataclass
class Context:
    """One rank of one world. `rank` and `size` count all ranks; the other numbers follow from the ranks' nodes.

    Attributes:
        world: the core's world.
        process_sets: process sets that the user has registered. A removed set stays: names contain places in this list.
        members_of: identities of the members of process sets, by id() of the set.
        pending: operations that have started.
        callbacks: called when this rank joins or leaves.
        losses: state for the recovery from losses.
        internal: process sets of the core that only the library uses.
        names: names of operations and objects.
        arguments: arguments of `init()`, if it made this context.
        helpers: `sordino.runtime.exchange.helpers.Helpers`, if some ranks only help.
        recorder: writes the run record of this rank. `record_by()` sets it.
        start: `sordino.rendezvous.starts.Start` by which `init()` made this context.
        newcomer: identity of this process while it waits to join a running job, alone in its world; else None.
    """

    world: World
    process_sets: list[Any] = field(default_factory=list)
    members_of: dict[int, list[int]] = field(default_factory=dict)
    pending: PendingOperations = field(default_factory=PendingOperations)
    callbacks: Callbacks = field(default_factory=Callbacks)
    losses: LossState = field(default_factory=LossState)
    internal: InternalSets = field(default_factory=InternalSets)
    arguments: dict[str, Any] | None = None
    helpers: Any = None
    recorder: Recorder | None = None
    start: Any = None
    newcomer: int | None = None

    def __post_init__(self) -> None:
        self.names = Names(self.process_sets)
        self._host_device: Device | None = None
        # Identities of the world that was last formed at the launcher or store. Smaller worlds follow it after losses.
        self._founders = list(range(self.world.size)) if self.newcomer is None else [self.newcomer]
        self._first_epoch = 0
        self._take_place()
        self.started = self.size  # number of ranks of the first world
        self.job_id = f"{self.world.host(0)}:{self.world.process(0)}"
        """Text that is the same on all ranks of a job: host and process id of the first rank."""
        _living[id(self)] = self

    def _take_place(self) -> None:
        nodes = self.world.nodes
        self.rank = self.world.rank
        self.size = self.world.size
        here = [rank for rank in range(self.size) if nodes[rank] == nodes[self.rank]]
        self.local_rank = here.index(self.rank)
        self.local_size = len(here)
        # Horovod's meaning: the nodes that have a rank with this local rank, in order.
        sizes = Counter(nodes)
        order = [node for node in sorted(sizes) if sizes[node] > self.local_rank]
        self.cross_rank = order.index(nodes[self.rank])
        self.cross_size = len(order)
        self.is_homogeneous = len(set(sizes.values())) == 1
        self.epoch = self.names.epoch = self._first_epoch + self.world.epoch
        self.survives_losses = self.losses.survivable = self.world.survives_losses
        self._choose_repeat()
        self.identities = [self._founders[rank] for rank in self.world.identities]
        """Identities of all ranks, in rank order."""
        self.identity = self.identities[self.rank]
        """Number of this rank in the first world, or from the launcher if it joined later. It never changes."""

    def _choose_repeat(self) -> None:
        # The core's function repeats an operation without Python. It cannot be used if ranks survive losses, because
        # they must agree before they repeat an operation, nor with a `host_device`, because it reads host memory.
        self.messenger = self.message = self.world.messages(torch.Tensor, DTYPE_CODES, note_change)
        if self.survives_losses or self._host_device is not None:
            self.repeat = self.message = _decline
        else:
            self.repeat = self.world.repeating(
                torch.Tensor, DTYPE_CODES, note_change, self.pending.taken, self.names.operation
            )
        self.repeat_and_note = self.repeat if self.recorder is None else self._repeat_and_note

    def _repeat_and_note(self, *call: Any) -> Any:
        result = self.repeat(*call)
        if result is not None:
            self.note_return()
        return result

    def record_by(self, recorder: Recorder) -> None:
        """Let `recorder` write the run record of this rank."""
        self.recorder = recorder
        self._choose_repeat()

    @property
    def host_device(self) -> Device | None:
        """Device that the memory of CPU tensors belongs to (`sordino.sim`); None: the CPU."""
        return self._host_device

    @host_device.setter
    def host_device(self, device: Device | None) -> None:
        self._host_device = device
        self._choose_repeat()

    def adopt(self, world: World) -> None:
        """Continue in another world with some of the ranks. Objects of the old world must be renewed."""
        world.take_over_trace(self.world)
        self.world = world
        self.internal = InternalSets()
        self.pending.free_all_names()
        self._take_place()

    def adopt_grown(self, world: World, founders: Sequence[int], epoch: int, started: int, job_id: str) -> None:
        """Continue in another world with more ranks, among which this rank may be new.

        Objects of the old world must be renewed. Ranks may have counted operations differently, so counts start anew.

        Args:
            world: the world.
            founders: identities of its ranks.
            epoch: its epoch, later than all before.
            started: number of ranks of the first world of the job.
            job_id: `job_id` of the job.
        """
        self._founders, self._first_epoch = list(founders), epoch
        self.started, self.job_id, self.newcomer = started, job_id, None
        self.process_sets.clear()  # none is registered, and a new rank does not know the places of earlier sets
        self.members_of.clear()
        self.losses.forget()
        self.losses.unsettled = True
        self.names.begin_anew()
        self.adopt(world)

    def has_process_sets(self) -> bool:
        """Return whether a process set of the user is registered now."""
        return any(one.process_set_id is not None for one in self.process_sets)

    def lockstep(self, key: str, process_set: Any) -> Lockstep:
        """Return the sequence, named `key`, of operations that the ranks of a process set execute together.

        After a loss the same name and process set give the same sequence.
        """
        name = self.names.lasting(key, process_set)
        identities = [self.identities[rank] for rank in process_set.ranks or []]
        return self.losses.locksteps.setdefault(name, Lockstep(name, identities))

    def shutdown(self, cause: str | BaseException = "") -> None:
        """Complete postponed work, and leave the world. Raises the first error of the postponed work after leaving.

        Args:
            cause: error because of which this rank leaves, which is sent to the other ranks; "" without an error.
                Operations that need this rank then report it as lost; after a `PeerLost`, the ranks that it names.
        """
        failures: list[Exception] = []
        _living.pop(id(self), None)
        for complete in self.callbacks.on_shutdown.living():
            try:
                complete()
            except Exception as error:
                failures.append(error)
        text, lost = text_of(cause), self._lost_by(cause)
        self.world.shutdown(text, lost)
        if self.helpers is not None:
            self.helpers.context.world.shutdown(text)
        for release in self.callbacks.on_end.living():
            release()
        if self.recorder is not None:
            self.recorder.close()
        flush()
        if failures:
            raise failures[0]

    def note_return(self) -> None:
        """Note the end of a call for communication, for the run record."""
        if self.recorder is not None:
            self.recorder.asked()

    def abort(self, cause: str | BaseException) -> None:
        """Tell all other ranks that this rank is about to end because of `cause`, which is as for `shutdown()`."""
        text, lost = text_of(cause), self._lost_by(cause)
        self.world.abort(text, lost)
        if self.helpers is not None:
            self.helpers.context.world.abort(text)

    def _lost_by(self, cause: str | BaseException) -> tuple[int, ...]:
        """Return the ranks that an error names as lost; () if ranks survive losses: it may be of an earlier world."""
        return cause.ranks if isinstance(cause, PeerLost) and not self.survives_losses else ()

    def rank_of(self, identity: int, what: str) -> int:
        """Return the current rank of `identity`. Raises PeerLost with the description `what` if it is lost."""
        if identity not in self.identities:
            raise PeerLost(f"{what} is lost")
        return self.identities.index(identity)


_living: weakref.WeakValueDictionary[int, Context] = weakref.WeakValueDictionary()


def living_contexts() -> list[Context]:
    """Return the contexts of this process that have not been shut down, in the order in which they were made."""
    return [context for reference in _living.valuerefs() if (context := reference()) is not None]


class _Local(threading.local):
    context: Context | None = None


_local = _Local()
_default: Context | None = None
_differ = False  # a thread has had a context of its own. To look one up takes longer than the rest of `current()`
_no_rank = ""


def current() -> Context:
    """Return the current context. Raises `UsageError` (a ValueError, as in Horovod) before `init()`."""
    context = (_local.context or _default) if _differ else _default
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
    global _differ
    _differ = True
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
    return tuple(context.identities[rank] for rank in process_set.ranks or [])
