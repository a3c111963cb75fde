"""States that survive faults: saved in memory, restored to the last commit, and synchronized among ranks.

In a commit, ranks exchange notes of what they have processed, and save only after that. A fault can interrupt it:

  where a rank was             _stopped   _version     in the next rejoin
  not in the commit            False      v            no rank can have saved; all go back to commit v
  in the exchange or save      True       v            saves it now if another rank has saved, else goes back
  after save                   False      v + 1        keeps commit v + 1

So a rank that has saved a commit knows that all ranks had come to it, and interrupted ranks can still save it. All
ranks resume from the same commit, and no rank's state has to replace another's.
"""

from __future__ import annotations

import functools
import operator
import queue
import random
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from sordino.errors import NoQuorum, UsageError
from sordino.runtime.collectives.autograd import allgather
from sordino.runtime.context import Context, current
from sordino.runtime.devices import HOST
from sordino.runtime.process_set import global_process_set
from sordino.runtime.recovery.growth import wait_outside
from sordino.runtime.recovery.losses import together
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

_LOOK_S = 0.1  # interval of checks whether processes wait to join
_REMOVED, _ADDED = 1, 2
_RESIZED = 4  # bit for a change of size, in addition to Horovod's 1 (hosts removed) and 2 (hosts added)


class HostsUpdatedInterrupt(RuntimeError):
    """The world or its hosts have changed since the last synchronization of the state.

    Either the world has another size than then, or `State.on_hosts_updated` was called on some rank. `run` calls the
    function again, without going back. Raised on all ranks together, by `State.commit` and `State.check_host_updates`.

    Attributes:
        skip_sync: whether the only change is that hosts were removed. (Horovod does not synchronize then; `run` always
            does.)
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the ranks, or their hosts, have changed since the state was synchronized")
        self.skip_sync = skip_sync


class State(ABC):
    """Base class of states for `run`.

    `ObjectState` and `TorchState` are complete. A user's subclass defines how it is saved, restored and synchronized.

    Args:
        bcast_object, get_rank: functions for subclasses, as `_bcast_object` and `_rank`; None for Sordino's.
    """

    def __init__(
        self, bcast_object: Callable[..., Any] | None = None, get_rank: Callable[[], int] | None = None
    ) -> None:
        self._bcast_object = broadcast_object if bcast_object is None else bcast_object
        self._rank = rank_here if get_rank is None else get_rank
        self._host_messages: queue.Queue[tuple[float, int]] = queue.Queue()  # another thread may fill it
        self._news = [0, 0]  # from these messages: the latest stamp, and the changes
        self._stamp = 0  # of the last change that all ranks know
        self._token = random.SystemRandom().getrandbits(62)  # identifies this rank, whose number may change
        self._version = 0  # number of commits and completed syncs; 0: no sync yet
        self._stopped = False  # in a commit, after all that this rank had to do for the others
        self._size: int | None = None  # of the world at the last sync
        self.leaves = False  # whether this rank leaves after the next commit
        self._stays_at = 0  # number of ranks at which it could not leave
        self._looked = 0.0  # time of the last check for newcomers
        self._reset_callbacks: list[Callable[[], Any]] = []
        self._parts: dict[str, Part[Any]] = {}  # in the same order on all ranks

    @abstractmethod
    def save(self) -> None:
        """Save the state in memory, on this rank only. `commit` saves it on all ranks together."""

    @abstractmethod
    def restore(self) -> None:
        """Restore the state that was saved last."""

    @abstractmethod
    def sync(self) -> None:
        """Make the state equal on all ranks. Collective."""

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Add functions that are called in order before the training function is repeated.

        They run on this rank's restored state, before it is synchronized. For example, they can scale a learning rate
        by `size()`.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Drop messages about hosts, and call `reset()` and the callbacks."""
        self._host_messages = queue.Queue()
        self._news = [0, 0]
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def reset(self) -> None:  # noqa: B027
        """Do nothing. Subclasses may override it; it is called before the callbacks."""

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Let the next `commit` or `check_host_updates` raise `HostsUpdatedInterrupt` on all ranks.

        For a program that watches the hosts, in any thread of any rank. Sordino itself never calls it.

        Args:
            timestamp: time of the change. It counts once, and older ones do not count after it.
            update_res: 1 if hosts were removed, 2 if some were added, 3 for both.
        """
        self._host_messages.put((timestamp, update_res))

    def leave(self) -> None:
        """Let this rank leave the job in good order, after its next `commit` or `check_host_updates`.

        There its process ends with status 0, and the others go on without it. Algorithms whose ranks have different
        models take the mean of all models first, so nothing that this rank has learned is lost. Can be called in a
        signal handler: `signal.signal(signal.SIGTERM, lambda *_: state.leave())`.

        Raises:
            UsageError: without `on_peer_lost="continue"`, with which the others can go on.
        """
        if not current().survives_losses:
            raise UsageError("state.leave() needs init(on_peer_lost='continue'), so that the other ranks can go on")
        self.leaves = True

    def commit(self) -> None:
        """Save the state on all ranks, in one copy in memory. After a fault, changes since the last commit are lost.

        Collective, so with algorithms in which ranks do not wait for each other the fastest rank waits here.

        Raises:
            HostsUpdatedInterrupt: ranks or hosts have changed. The state is saved.
        """
        for part in self._parts.values():
            part.prepare()
        self._stopped = True
        reports = self._exchange("commit")
        self._hear(reports, strict=True)
        self.save()
        self._stopped = False
        self._version += 1
        self._interrupt(reports)

    def check_host_updates(self) -> None:
        """Check for changes like `commit`, without saving. Collective.

        Raises:
            HostsUpdatedInterrupt: ranks or hosts have changed.
        """
        self._interrupt(self._exchange("check"))

    def _interrupt(self, reports: Sequence[RankReport]) -> None:
        self._stamp = max(one.stamp for one in reports)
        self._news = [0, 0]
        changes = functools.reduce(operator.or_, (one.changes for one in reports))
        if changes:
            raise HostsUpdatedInterrupt(skip_sync=changes == 1)

    def _hear_of_hosts(self, context: Context) -> None:
        now = time.monotonic()
        if now - self._looked > _LOOK_S:
            self._looked = now
            if wait_outside(context):
                self._news[1] |= _ADDED
        if self.leaves and context.size != self._stays_at:
            self._news[1] |= _REMOVED
        while not self._host_messages.empty():
            timestamp, change = self._host_messages.get()
            stamp = struct.unpack("<q", struct.pack("<d", timestamp))[0]  # as integers, they have the same order
            if stamp > self._stamp:
                self._news = [max(stamp, self._news[0]), self._news[1] | int(change)]

    # ---- used by run -------------------------------------------------------------------------------------------

    def stay(self) -> None:
        """Note that this rank could not leave, as all ranks want to. It tries again when their number changes."""
        self._stays_at = current().size if self.leaves else 0

    def layout(self) -> list[str]:
        """Return lines that must be the same on a process that wants to join: the values of this state."""
        lines = []
        for name in self._parts:
            value = getattr(self, name)
            lines.append(f"state.{name}: {type(value).__name__}")
            if isinstance(value, torch.nn.Module):
                lines += [f"{name}.{key} {list(tensor.shape)}" for key, tensor in value.state_dict().items()]
        return lines

    def rejoin(self, undo: bool) -> None:
        """Agree with the other ranks on the last commit and, with `undo`, go back to it.

        Collective, before each `sync`. Ranks that were interrupted in a commit that another rank has saved, save it
        too. Only a rank that completed the commit knows what all ranks had processed, so `sync` prefers its state.
        """
        reports = self._exchange("rejoin")
        self._size = len(reports)
        if self._stopped and self._version < max(one.version for one in reports):
            self.save()
        for part in self._parts.values():
            part.dismiss()
        self._stopped = False
        if undo:
            self.restore()

    # ---- exchange between ranks --------------------------------------------------------------------------------

    def _exchange(self, when: str) -> list[RankReport]:
        """Return the messages of all ranks about themselves, in rank order. Collective."""
        context = current()
        self._hear_of_hosts(context)
        stamp, changes = self._news
        if self._size is not None and self._size != context.size:
            changes |= _RESIZED
        mine = [self._token, self._version, max(stamp, self._stamp), changes, *self._notes()]
        if context.size == 1:
            return [RankReport(mine)]
        everything = allgather(torch.tensor([len(mine), *mine], device=HOST), name=f"elastic.{when}").tolist()
        reports = []
        while everything:
            end = 1 + everything[0]
            reports.append(RankReport(everything[1:end]))
            everything = everything[end:]
        return reports

    def _notes(self) -> list[int]:
        notes: list[int] = []
        for part in self._parts.values():
            mine = part.notes()
            notes += [len(mine), *mine]
        return notes

    def _hear(self, reports: Sequence[RankReport], strict: bool) -> None:
        """Pass the ranks' notes to the parts. With `strict`, raise UsageError for notes of another epoch.

        Ranks that have not synchronized yet have processed nothing, unless none has.
        """
        under_way = any(one.version > 0 for one in reports)
        for rank, one in enumerate(reports):
            if under_way and one.version == 0:
                continue
            notes = one.notes
            for part in self._parts.values():
                end = 1 + notes[0]
                if not part.hear(notes[1:end]) and strict:
                    raise UsageError(f"rank {rank} is in another epoch than this rank: call set_epoch() on all ranks")
                notes = notes[end:]


class RankReport:
    """Message of a rank about itself."""

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
        bcast_object: None or `hvd.broadcast_object`; or a function that is called on all ranks with a dict of the
            attributes, and returns the dict that all ranks shall have.
        get_rank: see `State`.
        attributes: attributes by name.

    Raises:
        UsageError: the state uses a name itself, or a value cannot be copied.
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
                raise UsageError(
                    f"{type(self).__name__}({name}=...): the state uses this name itself; use another name"
                )
        for name in sorted(attributes):
            super().__setattr__(name, attributes[name])
            part = self._part_of(attributes[name])
            self._parts[name] = Attributes(self, [name]) if part is None else part
            self._first_copy(name)

    def _part_of(self, value: Any) -> Part[Any] | None:
        """Return the part for a value; None for a plain attribute."""
        return None

    def _first_copy(self, name: str) -> None:
        part = self._parts[name]
        try:
            part.keep(part.read())
        except (TypeError, NotImplementedError) as error:  # copy.deepcopy raises these for a lock, a generator, a file
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
        """Make the state equal on all ranks, as far as its values are shared. Collective.

        The first time, all ranks take rank 0's state. Later, a rank that has not synchronized yet takes the state of
        the first rank that has. Ranks that have take shared values from the first of them. A model that differs between
        ranks by its optimizer's algorithm is kept, with the optimizer's state. Within a group that averages gradients
        all ranks take the model of the group's first rank. Everything is received before anything is replaced.
        """
        reports, received = together(current(), global_process_set, self._receive_all)
        rank = [one.token for one in reports].index(self._token)
        for part, snapshot in zip(self._parts.values(), received):
            part.install(snapshot, rank, len(reports))
        self._size = len(reports)
        self._version = max(one.version for one in reports) + 1
        current().losses.unsettled = False

    def _receive_all(self) -> tuple[list[RankReport], list[Snapshot]]:
        """Return the messages of all ranks, and a snapshot of each part for this rank.

        It changes nothing, so it can be repeated.
        """
        reports = self._exchange("sync")
        if current().losses.unsettled and all(one.version == 0 for one in reports):
            raise NoQuorum(
                "all ranks that had the state of the job were lost before this process, which has joined, received it"
            )
        self._hear(reports, strict=False)
        self.save()
        versions = [one.version for one in reports]
        own = {} if self._bcast_object is broadcast_object else self._received_by_users_function()
        return reports, [own.get(name) or self._receive(name, part, versions) for name, part in self._parts.items()]

    def _received_by_users_function(self) -> dict[str, Snapshot]:
        """Return snapshots of this rank's plain attributes, from the user's function."""
        plain = [part for part in self._parts.values() if isinstance(part, Attributes)]
        values = {name: value for part in plain for name, value in part.outgoing().tree().items()}
        return {name: Snapshot.of({name: value}) for name, value in self._bcast_object(values).items()}

    def _receive(self, name: str, part: Part[Any], versions: Sequence[int]) -> Snapshot:
        """Return this rank's snapshot of a part: its own, or another rank's."""
        if isinstance(part, Handled):
            return part.outgoing()  # its handler synchronizes it
        optimizers = [one for one in map(self.__dict__.get, self._parts) if isinstance(one, DistributedOptimizer)]
        sharing = sharing_of(getattr(self, name), optimizers)
        all_ranks, group, label = sharing.all_ranks, sharing.group, f"elastic.{name}"
        mine, ranks = part.outgoing(), all_ranks.ranks or []
        if current().rank not in ranks:
            return mine
        first = max(ranks, key=lambda rank: (versions[rank], -rank))
        if group is not None and group.process_set_id == all_ranks.process_set_id:
            return mine.received(first, all_ranks, label)
        late = [rank for rank in ranks if versions[rank] == 0]
        if late:
            theirs = mine.received(first, all_ranks, label)
            mine = theirs if self._version == 0 else mine
        if group is not None and len(late) < len(ranks):
            members = group.ranks or []
            mine = mine.received(max(members, key=lambda rank: (versions[rank], -rank)), group, f"{label}.group")
        return mine


class TorchState(ObjectState):
    """State of a model, its optimizer, and other values of the training, by keyword.

    Modules, optimizers, schedulers, `GradScaler` and other objects with `state_dict` and `load_state_dict` are saved by
    their state, and `ElasticSampler` by its processed indices. A value with a user's handler (`set_handler_registry`)
    is saved by the handler. All other values are attributes, as in `ObjectState`. With an optimizer whose ranks keep
    shards of its state (`LocalSGD`), making, saving, restoring and committing are collective.

    Args:
        model: a module, or None.
        optimizer: plain or `DistributedOptimizer`, or None.
        others: more of these objects, and attributes.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **others: Any) -> None:
        super().__init__(model=model, optimizer=optimizer, **others)

    def _part_of(self, value: Any) -> Part[Any] | None:
        return part_of(value)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute.

        As in Horovod, a new model, optimizer or similar object that replaces another one is saved at once.
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
