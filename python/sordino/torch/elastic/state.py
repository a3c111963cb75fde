"""States that survive faults: saved in memory, taken back to the last commit, and made equal on all ranks.

A commit is agreed: ranks meet in it and tell each other what they have processed, and only then save. So whoever has
saved a commit knows that all had come to it, and after a fault those who were stopped in it can save it still. Nobody
falls behind, and no rank's state has to win over another's.
"""

from __future__ import annotations

import functools
import operator
import queue
import random
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from sordino.errors import UsageError
from sordino.runtime.autograd import allgather
from sordino.runtime.context import current
from sordino.runtime.devices import HOST
from sordino.runtime.process_set import global_process_set
from sordino.runtime.recovery import together
from sordino.torch.elastic.handlers import (
    Handled,
    ModelStateHandler,
    OptimizerStateHandler,
    SamplerStateHandler,
    StateHandler,
    get_handler_registry,
    part_of,
    set_handler_registry,
)
from sordino.torch.elastic.parts import Attributes, Part, sharing_of
from sordino.torch.elastic.snapshot import Snapshot
from sordino.torch.functions import broadcast_object
from sordino.torch.lifecycle import rank as rank_here
from sordino.torch.optimizer import DistributedOptimizer

__all__ = [
    "HostsUpdatedInterrupt",
    "ModelStateHandler",
    "ObjectState",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "State",
    "StateHandler",
    "TorchState",
    "get_handler_registry",
    "set_handler_registry",
]

_RESIZED = 4  # of what has changed, beside Horovod's 1 (hosts were removed) and 2 (added)


class HostsUpdatedInterrupt(RuntimeError):
    """The world or its hosts have changed since the state was synchronized last.

    The world has another size than then, or `State.on_hosts_updated` was called on some rank: `run` calls the function
    again, with the state as it is. Raised on all ranks alike, by `State.commit` and `State.check_host_updates`.

    Attributes:
        skip_sync: whether hosts were only said to be removed. (Horovod does not synchronize then; `run` always does.)
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the ranks, or their hosts, have changed since the state was synchronized")
        self.skip_sync = skip_sync


class State(ABC):
    """What `run` needs of a state.

    `ObjectState` and `TorchState` are ready made; a subclass of one's own says how it is saved, restored and made
    equal.

    Args:
        bcast_object, get_rank: functions that subclasses use, as `_bcast_object` and `_rank`; None for Sordino's.
    """

    def __init__(
        self, bcast_object: Callable[..., Any] | None = None, get_rank: Callable[[], int] | None = None
    ) -> None:
        self._bcast_object = broadcast_object if bcast_object is None else bcast_object
        self._rank = rank_here if get_rank is None else get_rank
        self._host_messages: queue.Queue[tuple[float, int]] = queue.Queue()  # another thread may fill it
        self._news = [0, 0]  # of messages: the latest stamp, and what has changed
        self._stamp = 0  # of the last change that all ranks know of
        self._token = random.SystemRandom().getrandbits(62)  # by which a rank finds itself; its number may change
        self._version = 0  # counts commits, and syncs that a rank has completed; 0: never yet
        self._stopped = False  # in a commit, after everything that this rank had to do for the others
        self._size: int | None = None  # of the world at the last sync
        self._reset_callbacks: list[Callable[[], Any]] = []
        self._parts: dict[str, Part[Any]] = {}  # in the same order on all ranks

    @abstractmethod
    def save(self) -> None:
        """Save the state in memory, on this rank alone: `commit` is what all ranks do together."""

    @abstractmethod
    def restore(self) -> None:
        """Go back to what was saved last."""

    @abstractmethod
    def sync(self) -> None:
        """Make the state equal on all ranks. Collective."""

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Have these called, in order, when the function is about to be called again.

        They are called on this rank's restored state and before it is synchronized: to scale a learning rate by
        `size()`, for example.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Forget what was heard of hosts, and call `reset()` and the callbacks."""
        self._host_messages = queue.Queue()
        self._news = [0, 0]
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def reset(self) -> None:  # noqa: B027
        """Do nothing here; for subclasses: is called before the callbacks."""

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Have the next `commit` or `check_host_updates` raise `HostsUpdatedInterrupt` on all ranks.

        For what watches the hosts, in any thread of any rank; Sordino itself calls it never.

        Args:
            timestamp: of the change; it counts once, and none that is older counts after it.
            update_res: 1 if hosts were removed, 2 if some were added, 3 for both.
        """
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save the state on all ranks, in one copy in memory: what a fault takes away is what came after the last one.

        Collective, so with algorithms that wait for nobody the fastest rank waits here.

        Raises:
            HostsUpdatedInterrupt: see there; the state is saved.
        """
        for part in self._parts.values():
            part.prepare()
        self._stopped = True
        told = self._exchange("commit")
        self._hear(told, strict=True)
        self.save()
        self._stopped = False
        self._version += 1
        self._interrupt(told)

    def check_host_updates(self) -> None:
        """Do as `commit`, without saving. Collective.

        Raises:
            HostsUpdatedInterrupt: see there.
        """
        self._interrupt(self._exchange("check"))

    def _interrupt(self, told: Sequence[Told]) -> None:
        self._stamp = max(one.stamp for one in told)
        self._news = [0, 0]
        changes = functools.reduce(operator.or_, (one.changes for one in told))
        if changes:
            raise HostsUpdatedInterrupt(skip_sync=changes == 1)

    def _hear_of_hosts(self) -> None:
        while not self._host_messages.empty():
            timestamp, change = self._host_messages.get()
            stamp = struct.unpack("<q", struct.pack("<d", timestamp))[0]  # in the order of positive numbers
            if stamp > self._stamp:
                self._news = [max(stamp, self._news[0]), self._news[1] | int(change)]

    # ---- run's side --------------------------------------------------------------------------------------------

    def rejoin(self, undo: bool) -> None:
        """Agree with the other ranks on the last commit and, with `undo`, go back to it.

        Collective, before each `sync`. Ranks that were stopped in a commit that another one has saved save it, too; but
        that one alone knows what all had processed, so it goes first in `sync`.
        """
        told = self._exchange("rejoin")
        self._size = len(told)
        if self._stopped and self._version < max(one.version for one in told):
            self.save()
        for part in self._parts.values():
            part.dismiss()
        self._stopped = False
        if undo:
            self.restore()

    # ---- what ranks tell each other ----------------------------------------------------------------------------

    def _exchange(self, when: str) -> list[Told]:
        """Return what all ranks say of themselves, in rank order. Collective."""
        context = current()
        self._hear_of_hosts()
        stamp, changes = self._news
        if self._size is not None and self._size != context.size:
            changes |= _RESIZED
        mine = [self._token, self._version, max(stamp, self._stamp), changes, *self._notes()]
        if context.size == 1:
            return [Told(mine)]
        everything = allgather(torch.tensor([len(mine), *mine], device=HOST), name=f"elastic.{when}").tolist()
        told = []
        while everything:
            end = 1 + everything[0]
            told.append(Told(everything[1:end]))
            everything = everything[end:]
        return told

    def _notes(self) -> list[int]:
        notes: list[int] = []
        for part in self._parts.values():
            mine = part.notes()
            notes += [len(mine), *mine]
        return notes

    def _hear(self, told: Sequence[Told], strict: bool) -> None:
        """Take what others say of their parts. UsageError with `strict` for what is of another epoch."""
        for rank, one in enumerate(told):
            notes = one.notes
            for part in self._parts.values():
                end = 1 + notes[0]
                if not part.hear(notes[1:end]) and strict:
                    raise UsageError(f"rank {rank} is in another epoch than this one: call set_epoch() on all ranks")
                notes = notes[end:]


class Told:
    """What a rank says of itself."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.token = numbers[0]
        self.version = numbers[1]
        self.stamp = numbers[2]
        self.changes = numbers[3]
        self.notes = numbers[4:]


class ObjectState(State):
    """Attributes of any kind, by keyword: `ObjectState(epoch=0, batch=0)`.

    They are copied by `copy.deepcopy`, and pickled when they are synchronized: see `broadcast_object` about trust.

    Args:
        bcast_object: None or `hvd.broadcast_object`; or a function that is called with a dict of the attributes, on all
            ranks, and returns the one that all ranks are to have.
        get_rank: see `State`.
        attributes: by name.

    Raises:
        UsageError: a name that the state uses itself, or a value that cannot be copied.
    """

    def __init__(
        self,
        bcast_object: Callable[..., Any] | None = None,
        get_rank: Callable[[], int] | None = None,
        **attributes: Any,
    ) -> None:
        super().__init__(bcast_object, get_rank)
        for name in attributes:
            if name.startswith("_") or hasattr(type(self), name):
                raise UsageError(f"{type(self).__name__}({name}=...): the state uses this name itself; take another")
        for name in sorted(attributes):
            super().__setattr__(name, attributes[name])
            part = self._part_of(attributes[name])
            self._parts[name] = Attributes(self, [name]) if part is None else part
            self._first_copy(name)

    def _part_of(self, value: Any) -> Part[Any] | None:
        """Return what a value is by itself, if it is more than an attribute."""
        return None

    def _first_copy(self, name: str) -> None:
        part = self._parts[name]
        try:
            part.keep(part.read())
        except (TypeError, NotImplementedError) as error:  # what copy.deepcopy makes of a lock, a generator, a file
            found = type(getattr(self, name)).__name__
            raise UsageError(f"{type(self).__name__}({name}=...): a {found} cannot be copied ({error})") from error

    def save(self) -> None:
        read = [(part, part.read()) for part in self._parts.values()]
        for part, values in read:
            part.keep(values)

    def restore(self) -> None:
        for part in self._parts.values():
            part.restore()

    def sync(self) -> None:
        """Make the state equal on all ranks, as far as their values are to be equal. Collective.

        The first time all take rank 0's. Later a rank that has not synchronized yet takes that of the first one that
        has, and those who have take from the first of them what ranks share. A model that differs from others' between
        steps, as its optimizer's algorithm has it, stays, with its optimizer's state; within a group that averages
        gradients all take that of the first. Everything is received before anything is replaced.
        """
        told, received = together(current(), global_process_set, self._receive_all)
        rank = [one.token for one in told].index(self._token)
        for part, snapshot in zip(self._parts.values(), received):
            part.install(snapshot, rank, len(told))
        self._size = len(told)
        self._version = max(one.version for one in told) + 1

    def _receive_all(self) -> tuple[list[Told], list[Snapshot]]:
        """Return what all ranks say, and what this one is to have of each part.

        Changes nothing, so it can be repeated.
        """
        told = self._exchange("sync")
        self._hear(told, strict=False)
        self.save()
        versions = [one.version for one in told]
        own = {} if self._bcast_object is broadcast_object else self._received_by_users_function()
        return told, [own.get(name) or self._receive(name, part, versions) for name, part in self._parts.items()]

    def _received_by_users_function(self) -> dict[str, Snapshot]:
        """Return what this rank is to have of its plain attributes."""
        plain = [part for part in self._parts.values() if isinstance(part, Attributes)]
        values = {name: value for part in plain for name, value in part.outgoing().tree().items()}
        return {name: Snapshot.of({name: value}) for name, value in self._bcast_object(values).items()}

    def _receive(self, name: str, part: Part[Any], versions: Sequence[int]) -> Snapshot:
        """Return what this rank is to have of a part: its own, or another's."""
        if isinstance(part, Handled):
            return part.outgoing()  # its handler makes it equal
        optimizers = [one for one in map(self.__dict__.get, self._parts) if isinstance(one, DistributedOptimizer)]
        sharing = sharing_of(getattr(self, name), optimizers)
        everybody, group, label = sharing.everybody, sharing.group, f"elastic.{name}"
        mine, ranks = part.outgoing(), everybody.ranks or []
        if current().rank not in ranks:
            return mine
        first = max(ranks, key=lambda rank: (versions[rank], -rank))
        if group is not None and group.process_set_id == everybody.process_set_id:
            return mine.received(first, everybody, label)
        late = [rank for rank in ranks if versions[rank] == 0]
        if late:
            theirs = mine.received(first, everybody, label)
            mine = theirs if self._version == 0 else mine
        if group is not None and len(late) < len(ranks):
            members = group.ranks or []
            mine = mine.received(max(members, key=lambda rank: (versions[rank], -rank)), group, f"{label}.group")
        return mine


class TorchState(ObjectState):
    """A model, its optimizer, and whatever else training goes on from, by keyword.

    Modules, optimizers, schedulers, `GradScaler` and anything else with `state_dict` and `load_state_dict` are saved by
    their state, `ElasticSampler` by what is processed, what has a handler of the user's (`set_handler_registry`) by
    that, the rest as attributes, as in `ObjectState`. With an optimizer whose ranks keep shards of its state
    (`LocalSGD`) making, saving, restoring and committing are collective.

    Args:
        model: a module, or None.
        optimizer: plain or `DistributedOptimizer`, or None.
        others: more of them, and attributes.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **others: Any) -> None:
        super().__init__(model=model, optimizer=optimizer, **others)

    def _part_of(self, value: Any) -> Part[Any] | None:
        return part_of(value)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute.

        As in Horovod, a model, an optimizer or the like that takes the place of another is saved at once.
        """
        super().__setattr__(name, value)
        if name in self.__dict__.get("_parts", ()):
            old = self._parts[name]
            if isinstance(old, Handled):
                old.handler.set_value(value)
                return
            part = part_of(value)
            if part is not None:
                self._parts[name] = part
                self._first_copy(name)
            elif not isinstance(old, Attributes):
                self._parts[name] = Attributes(self, [name])
                self._first_copy(name)
