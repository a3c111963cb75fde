"""Launchers without MPI: how rank and size are determined from environment variables.

The core reads the variables of MPI's launchers (`_core.launcher`). A batch system's counts (SLURM_NTASKS) are not used,
because a script on its first node has them, and runs alone. Only srun sets SLURM_STEP_NUM_TASKS.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from sordino.errors import UsageError

RENDEZVOUS = "SORDINO_RENDEZVOUS"  # socket at which ranks of `sordino run` meet
RANK, SIZE = "SORDINO_RANK", "SORDINO_SIZE"
TOKEN = "SORDINO_TOKEN"
ON_PEER_LOST = "SORDINO_ON_PEER_LOST"
NEWCOMER = "SORDINO_NEWCOMER"  # set for a process that joins a running job; a launcher's number for it is >= SIZE
MIN_RANKS = "SORDINO_MIN_RANKS"  # number of ranks below which hvd.elastic.run waits
RANK_VARIABLES = "SORDINO_RANK_VARIABLES"  # notes of the rank that started this process (children.py)
_TORCHRUN = "TORCHELASTIC_RUN_ID"  # set by torchrun only; Accelerate starts torchrun
_LIKE_TORCHRUN = "a launcher for torch.distributed (torchrun, Accelerate, DeepSpeed, Ray, Kubeflow)"
_LAUNCHERS = (
    (_LIKE_TORCHRUN, "WORLD_SIZE", "RANK"),
    ("horovodrun", "HOROVOD_SIZE", "HOROVOD_RANK"),
    ("MVAPICH's launcher", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    ("jsrun", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"),
)
_SRUN = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
_PMI = ("PMI_RANK", "PMIX_RANK", "PMI_FD")  # srun sets these for an MPI library
ADDRESS, PORT = "MASTER_ADDR", "MASTER_PORT"  # of the store
_STORE = (ADDRESS, PORT)
_FIRST_PORT, _PORTS = 15000, 10000  # for jobs of Slurm without MASTER_PORT


@dataclass(frozen=True)
class Launch:
    """Information from a launcher.

    Attributes:
        launcher: name of the launcher.
        size: number of processes that it has started.
        size_variable: environment variable with the size.
        variables: variables of the launcher that are set, with their values.
    """

    launcher: str
    size: int
    size_variable: str
    variables: Mapping[str, str]

    def __str__(self) -> str:
        said = ", ".join(f"{name}={value}" for name, value in self.variables.items())
        return f"{said}: {self.launcher} has started {self.size} processes"


@dataclass(frozen=True)
class LaunchedRank:
    """Rank of this process, and where the ranks meet.

    Attributes:
        rank: rank of this process, from 0.
        size: number of ranks.
        launch: information from the launcher.
        address: host and port of the store at which the ranks meet; None for the socket of `sordino run`.
        hosts_store: whether rank 0 opens that store; else the launcher has opened it.
        run: name of the job at the store.
        restarts: whether the launcher restarts all ranks at the same store, so that ranks must agree which entries
            belong to their start. Then no process can join.
        newcomer: whether this process joins a running job. Its rank is the number that the launcher gave it; at a store
            rank and size are 0, because only the store knows them.
    """

    rank: int
    size: int
    launch: Launch
    address: tuple[str, int] | None = None
    hosts_store: bool = True
    run: str = ""
    restarts: bool = False
    newcomer: bool = False


def _launch(environment: Mapping[str, str], launcher: str, size_variable: str, *others: str) -> Launch | None:
    text = environment.get(size_variable, "")
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"{size_variable}={text!r} is not a number of processes; correct it or unset it")
    variables = {name: environment[name] for name in (size_variable, *others) if environment.get(name)}
    return Launch(launcher, int(text), size_variable, variables)


def launches(environment: Mapping[str, str]) -> Iterator[Launch]:
    """Yield the information from launchers other than MPI's and `sordino run`.

    Raises:
        UsageError: a variable for the number of processes is not a positive number.
    """
    for launcher, size_variable, rank_variable in _LAUNCHERS:
        by_torchrun = launcher == _LIKE_TORCHRUN and environment.get(_TORCHRUN)
        found = _launch(environment, "torchrun" if by_torchrun else launcher, size_variable, rank_variable)
        if found is not None:
            yield found


def launched_rank(environment: Mapping[str, str], mpi_size: int, mpi_variable: str) -> LaunchedRank | None:
    """Return the place of this process if a launcher without MPI has started it, else None.

    Args:
        environment: environment of this process.
        mpi_size: number of processes that MPI's launcher or srun has started; 0 without one.
        mpi_variable: environment variable with that number.

    Raises:
        UsageError: launchers contradict each other, or a launcher gives no way for its processes to meet.
    """
    ours = _ours(environment)
    torch = next(launches({name: environment.get(name, "") for name in ("WORLD_SIZE", "RANK", _TORCHRUN)}), None)
    if ours is None and environment.get(NEWCOMER):
        return _newcomer_at_a_store(environment)
    if ours is not None:
        if torch is not None and environment.get(_TORCHRUN) and torch.size != ours.size:
            raise _contradiction(torch, str(ours.launch), list(ours.launch.variables))
        return ours
    if _by_srun_alone(environment, mpi_variable) and mpi_size > 1:
        if torch is not None and torch.size > 1:
            return _among(torch, environment)
        return _in_slurm(environment)
    if mpi_size > 0 and mpi_variable != _SRUN[0]:
        if torch is not None and torch.size not in (1, mpi_size) and (mpi_size == 1 or environment.get(_TORCHRUN)):
            raise _contradiction(torch, f"{mpi_variable}={mpi_size}: MPI's launcher has started {mpi_size}", [])
        return None
    for launch in launches(environment):
        if launch.size == 1 and not _may_grow(launch, environment):
            continue
        if launch.size_variable == "WORLD_SIZE":
            return _among(launch, environment)
        raise UsageError(
            f"{launch}. They cannot reach each other without MPI, so each would train alone. Start the script with "
            f"`sordino run -np {launch.size} -- python script.py`, or with mpirun. {_left_over(launch.variables)}"
        )
    return None


def _ours(environment: Mapping[str, str]) -> LaunchedRank | None:
    if not environment.get(RENDEZVOUS):
        return None
    launch = _launch(environment, "`sordino run`", SIZE, RANK)
    if launch is None:
        raise UsageError(f"{RENDEZVOUS} is set, but {SIZE} is not. {_left_over([RENDEZVOUS])}")
    newcomer = bool(environment.get(NEWCOMER))
    return LaunchedRank(_rank(environment, RANK, launch, newcomer), launch.size, launch, newcomer=newcomer)


def _newcomer_at_a_store(environment: Mapping[str, str]) -> LaunchedRank:
    variables = {name: environment.get(name, "") for name in (NEWCOMER, *_STORE)}
    launch = Launch("`sordino join`", 1, NEWCOMER, variables)
    return LaunchedRank(0, 0, launch, _address(environment, launch), False, newcomer=True)


def _may_grow(launch: Launch, environment: Mapping[str, str]) -> bool:
    """Return whether a job that begins with one rank meets at a store of its launcher, where others may join it."""
    complete = launch.size_variable == "WORLD_SIZE" and all(environment.get(name) for name in ("RANK", *_STORE))
    return complete and _agents(environment) and environment.get(ON_PEER_LOST) == "continue"


def _by_srun_alone(environment: Mapping[str, str], mpi_variable: str) -> bool:
    """Return whether srun has started this process without variables for an MPI library."""
    return mpi_variable == _SRUN[0] and not any(environment.get(name) for name in _PMI)


def _among(launch: Launch, environment: Mapping[str, str]) -> LaunchedRank:
    """Return the place from torch.distributed's variables."""
    run = environment.get(_TORCHRUN, "")
    address = _address(environment, launch, "RANK")
    rank, hosts = _rank(environment, "RANK", launch), not _agents(environment)
    return LaunchedRank(rank, launch.size, launch, address, hosts, run, restarts=bool(run))


def _agents(environment: Mapping[str, str]) -> bool:
    """Return whether the launcher has opened the store."""
    return environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _address(environment: Mapping[str, str], launch: Launch, *others: str) -> tuple[str, int]:
    """Return the address of the store. Raises UsageError if it, or one of the other variables, is not set."""
    missing = [name for name in (*others, *_STORE) if not environment.get(name)]
    if missing:
        raise UsageError(
            f"{launch}, but {' and '.join(missing)}, by which they find each other, "
            f"{'is' if len(missing) == 1 else 'are'} not set, so each would train alone. Set the missing variables, or "
            f"start the script with torchrun, or with `sordino run -np {launch.size} -- python script.py`. "
            f"{_left_over(launch.variables)}"
        )
    port = environment[PORT]
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(f"MASTER_PORT={port!r} is not a port; correct it or unset it")
    return environment[ADDRESS], int(port)


def _in_slurm(environment: Mapping[str, str]) -> LaunchedRank:
    """Return the place from srun's variables. The first node has the store, at a port derived from the job id."""
    launch = _launch(environment, "srun", *_SRUN)
    assert launch is not None
    job, step = environment.get("SLURM_JOB_ID", "0"), environment.get("SLURM_STEP_ID", "0")
    numbers = [int(text) if text.isdecimal() else 0 for text in (job, step)]
    port = environment.get("MASTER_PORT") or str(_FIRST_PORT + (numbers[0] * 16 + numbers[1]) % _PORTS)
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    named = {"MASTER_ADDR": environment.get("MASTER_ADDR") or first_host(nodes), "MASTER_PORT": port}
    seen = {**environment, **named, "RANK": environment.get(_SRUN[1], "")}
    place = _among(launch, seen)
    return LaunchedRank(place.rank, place.size, launch, place.address, True, f"slurm.{job}.{step}")


def first_host(nodes: str) -> str:
    """Return the first host of a list of nodes in Slurm's notation, such as `gpu[017-020,031]` or `a1,b2`."""
    found = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,\[]*))?", nodes)
    return "".join(part for part in found.groups() if part) if found else nodes


def _rank(environment: Mapping[str, str], variable: str, launch: Launch, newcomer: bool = False) -> int:
    text = environment.get(variable, "")
    if not text.isdecimal() or (int(text) >= launch.size) != newcomer:
        raise UsageError(
            f"{variable}={text!r} is not a rank of {launch.size_variable}={launch.size}; correct it. "
            f"{_left_over(launch.variables)}"
        )
    return int(text)


def _contradiction(launch: Launch, other: str, variables: list[str]) -> UsageError:
    return UsageError(
        f"{launch}, but {other}: it is unclear which of these processes are the ranks. Use only one launcher. "
        f"{_left_over([*launch.variables, *variables])}"
    )


def _left_over(variables: Mapping[str, str] | list[str]) -> str:
    names = list(variables)
    return (
        f"If the variables are left from something else: `unset {' '.join(names)}`, or before init() in a notebook: "
        f"for name in {names}: os.environ.pop(name)"
    )


def environment_of(pid: int) -> dict[str, str]:
    """Return the initial environment of a process; {} if it has ended, or this user may not read it."""
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="surrogateescape").split("\0")
    except OSError:
        return {}
    return {name: value for name, _, value in (word.partition("=") for word in words)}
