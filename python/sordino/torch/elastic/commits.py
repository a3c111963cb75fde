"""Base class of states that survive faults: ranks commit together, and go back together to the last commit.

In a commit, ranks exchange notes of what they have processed, and save only after that. A fault can interrupt it:

  where a rank was             _stopped   _version     in the next rejoin
  not in the commit            False      v            no rank can have saved; all go back to commit v
  in the exchange or save      True       v            saves it now if another rank has saved, else goes back
  after save                   False      v + 1        keeps commit v + 1

So a rank that has saved a commit knows that all ranks had reached it, and interrupted ranks can still save it. All
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

from sordino.errors import UsageError
from sordino.runtime.collectives.autograd import allgather
from sordino.runtime.context import Context, current
from sordino.runtime.devices import HOST
from sordino.runtime.recovery.growth import wait_outside
from sordino.torch.elastic.parts import Part
from sordino.torch.functions import broadcast_object
from sordino.torch.lifecycle import rank as rank_here

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
        bcast_object, get_rank: functions that subclasses use as `_bcast_object` and `_rank`; None: Sordino's.
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
        self._stopped = False  # whether this rank is in a commit, and has done its part for the other ranks
        self._size: int | None = None  # of the world at the last sync
        self.leaves = False  # whether this rank leaves after the next commit
        self._stays_at = 0  # number of ranks when this rank last could not leave; 0: never
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

        There its process ends with status 0, and the other ranks continue without it. Algorithms whose ranks have
        different models take the mean of all models first, so nothing that this rank has learned is lost. Can be called
        in a signal handler: `signal.signal(signal.SIGTERM, lambda *_: state.leave())`.

        Raises:
            UsageError: without `on_peer_lost="continue"`, the other ranks cannot continue.
        """
        if not current().survives_losses:
            raise UsageError("state.leave() needs init(on_peer_lost='continue'), so that the other ranks can go on")
        self.leaves = True

    def commit(self) -> None:
        """Save the state on all ranks, in one copy in memory. After a fault, changes since the last commit are lost.

        Collective, so with algorithms whose ranks do not wait for each other, the fastest rank waits here.

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
        self._stays_at = current().size

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

        Collective, before each `sync`. A rank that was interrupted in a commit saves it, too, if another rank has saved
        it. Only a rank that completed the commit knows what all ranks had processed, so `sync` prefers its state.
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
        """Return the reports of all ranks, in rank order. Collective."""
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

        Notes of ranks that have not synchronized yet are skipped, unless no rank has.
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
    """Report of a rank: its token and version, the stamp of the last change it knows, its changes, and its notes."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.token = numbers[0]
        self.version = numbers[1]
        self.stamp = numbers[2]
        self.changes = numbers[3]
        self.notes = numbers[4:]
