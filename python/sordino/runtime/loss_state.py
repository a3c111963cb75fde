"""State of one rank from which it recovers after a loss (`sordino.runtime.recovery.losses`)."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from sordino.errors import UsageError


def nothing() -> None:
    """Undo nothing, for work that can simply be repeated."""


@dataclass
class Lockstep:
    """A sequence of parts that some ranks execute together, in the same order (`sordino.runtime.recovery.losses`).

    Attributes:
        key: name, the same on all ranks.
        identities: identities of the ranks (their numbers in the first world).
        begun_part: number of the part in progress, or of the last one.
        received_part: the last part whose results this rank has.
        committed_part: the last part whose results all ranks are known to have.
        completed_part: the last complete part, as determined by the remaining ranks after a loss.
        undo: restores the state of this rank before the part in progress. `nothing` between parts, because a reference
            to it could keep an optimizer alive that the user has dropped.
    """

    key: str
    identities: list[int]
    begun_part: int = 0
    received_part: int = 0
    committed_part: int = 0
    completed_part: int = 0
    undo: Callable[[], None] = field(default=nothing, repr=False)
    _working: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @contextmanager
    def next(self, undo: Callable[[], None]) -> Iterator[int]:
        """Yield the number of the next part, which the block executes. If the block raises, the part is not counted.

        Raises:
            UsageError: another thread of this rank executes a part.
        """
        if not self._working.acquire(blocking=False):
            raise UsageError(
                f"another thread of this rank is in the middle of a blocking operation ({self.key}). With "
                "on_peer_lost='continue' all ranks must execute operations in one order, so call them from one thread"
            )
        try:
            self.begun_part += 1
            self.undo = undo
            yield self.begun_part
        except BaseException:
            self.begun_part -= 1
            # The next part has this number, and its results have not been received.
            self.received_part = min(self.received_part, self.begun_part)
            raise
        finally:
            self.undo = nothing
            self._working.release()


@dataclass
class Recoverable:
    """An object that is renewed when the remaining ranks meet after a loss.

    Attributes:
        weak_renew: weak method that renews the object, if all of its ranks still have it.
        weak_give_up: weak method that undoes what the loss has interrupted, if some of its ranks no longer have the
            object.
        name: name, the same on all ranks that renew it together; "" if each rank renews it alone.
        process_set: the ranks that have the object.
    """

    weak_renew: Callable[[], Callable[[], None] | None]
    weak_give_up: Callable[[], Callable[[], None] | None]
    name: str = ""
    process_set: Any = None


class Growing(Protocol):
    """An object that all ranks have made, in the same order, and that must be renewed when ranks join."""

    def layout(self) -> list[str]:
        """Return lines that must be the same on a process that wants to join."""

    def before_growth(self) -> None:
        """Bring this object into a state from which a new rank can start. Collective over the old world."""

    def after_growth(self) -> None:
        """Continue in the grown world. Collective over it."""


@dataclass
class Resized:
    """A callback for changes of the number of ranks, and the last number of ranks that it knows."""

    callback: Callable[[int, int], None]
    size: int


@dataclass
class LossState:
    """State of one rank that its recovery needs.

    Attributes:
        survivable: whether the remaining ranks continue after a loss.
        locksteps: sequences of parts, by their names.
        recoverables: objects to renew, by id().
        on_resize: callbacks for changes of the number of ranks.
        told_size: number of ranks that was last reported to the callbacks; 0 before the first change.
        tells_in_growth: whether this rank is in a growth, which calls the callbacks. Recoveries call them only if some
            rank is not in a growth.
        unsettled: whether, as far as this rank knows, a rank has joined that does not have the job's model yet.
        mean_after_loss: whether recovery may take the mean of all models, as the ranks have agreed after the last loss.
        recovering: lock held by the thread that recovers.
        empty_recoveries: number of successive recoveries without a lost rank.
    """

    survivable: bool = False
    locksteps: dict[str, Lockstep] = field(default_factory=dict)
    recoverables: dict[int, Recoverable] = field(default_factory=dict)
    on_resize: list[Resized] = field(default_factory=list)
    told_size: int = 0
    tells_in_growth: bool = False
    unsettled: bool = False
    mean_after_loss: bool = True
    _growing: list[weakref.ref[Growing]] = field(default_factory=list)
    recovering: threading.RLock = field(default_factory=threading.RLock)
    empty_recoveries: int = 0
    _thread: threading.local = field(default_factory=threading.local)

    def living_recoverables(self) -> list[Recoverable]:
        """Return the existing objects to renew after a loss, in the order in which to renew them.

        Objects that ranks renew together come first, by name. The order of registration may differ between ranks,
        because a loss may interrupt a meeting, in which objects register again.
        """
        self.recoverables = {key: one for key, one in self.recoverables.items() if one.weak_renew() is not None}
        return sorted(self.recoverables.values(), key=lambda one: (not one.name, one.name))

    def living_growing(self) -> list[Growing]:
        """Return the existing objects to renew when ranks join."""
        return [one for reference in self._growing if (one := reference()) is not None]

    def grows(self, thing: Growing) -> None:
        """Register an object to renew when ranks join. All ranks register their objects in the same order."""
        living = self.living_growing()
        if all(one is not thing for one in living):
            self._growing = [weakref.ref(one) for one in (*living, thing)]

    def forget(self) -> None:
        """Forget the sequences and objects of a world that another one replaces. The objects register again."""
        self.locksteps.clear()
        self.recoverables.clear()

    @contextmanager
    def raising_on_loss(self) -> Iterator[None]:
        """Make this thread's operations raise within the block when a rank is lost.

        The caller repeats them.
        """
        before = self.raises_on_loss
        self._thread.raises = True
        try:
            yield
        finally:
            self._thread.raises = before

    @property
    def raises_on_loss(self) -> bool:
        """Whether this thread's operations raise when a rank is lost, instead of recovering."""
        return not self.survivable or getattr(self._thread, "raises", False)
