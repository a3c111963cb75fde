"""Processes that ranks start, such as workers of a DataLoader: they inherit their rank's variables, but are not ranks.

A process of `multiprocessing` also runs the top of the rank's script, which may call `init()`, so `init()` does nothing
there. Any other program that calls `init()` with the variables of the rank that started it gets an error.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Iterable, Mapping, MutableMapping

from sordino import _core
from sordino.errors import UsageError
from sordino.rendezvous.environment import RANK_VARIABLES, RENDEZVOUS, LaunchedRank, environment_of, launched_rank


def started_by_a_rank(environment: Mapping[str, str] = os.environ) -> str:
    """Return the rank that has started this process by `multiprocessing`; "" if none has, or this process is a rank.

    A worker of a DataLoader inherits the variables of its rank, and runs the top of the rank's script. This process is
    not a rank in two cases: it runs the top of the script with the same variables as its parent, or `init()` of a rank
    has noted these variables. A process whose parent is not a rank may be a rank.

    Raises:
        UsageError: launchers contradict each other; or a rank has started this program in another way, with its
            variables.
    """
    mpi_size, variable = _core.launcher()
    place = launched_rank(environment, mpi_size, variable)
    if place is None and mpi_size <= 1:
        return ""
    process, variables, meeting = _noted(environment)
    parent = _parent()
    if parent is None:
        if place is not None and process != str(os.getpid()) and meeting == _meeting(place, environment):
            names = [RENDEZVOUS] if place.address is None else list(place.launch.variables)
            raise UsageError(
                f"rank {place.rank} (process {process}) has started this program with its variables, but a rank is one "
                "process. Do not call init() here; or start the program without these variables, so that it runs "
                f"alone: `env -u {' -u '.join(names)} ...`"
            )
        return ""
    names = [variable] if place is None else list(place.launch.variables)
    mine = _values(environment, names)
    inherited = _runs_top_of_script() and mine == _values(environment_of(parent), names)
    if not inherited and json.dumps(mine) != variables:
        return ""
    return "a rank" if place is None else f"rank {place.rank}"


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
    """Store in the environment which rank this process is, and by which variables, for the processes that it starts."""
    place = launched_rank(environment, *_core.launcher())
    if place is not None:
        variables = json.dumps(_values(environment, place.launch.variables))
        environment[RANK_VARIABLES] = "\t".join((str(os.getpid()), variables, _meeting(place, environment)))


def _noted(environment: Mapping[str, str]) -> tuple[str, str, str]:
    """Return the notes of a rank: its process, its launcher's variables, and its meeting (see `_meeting`)."""
    process, _, rest = environment.get(RANK_VARIABLES, "").partition("\t")
    variables, _, meeting = rest.partition("\t")
    return process, variables, meeting


def _meeting(place: LaunchedRank, environment: Mapping[str, str]) -> str:
    """Return as text a process's rank and where it meets the others. They differ in a job that a rank starts."""
    return json.dumps([place.rank, place.size, place.address or environment.get(RENDEZVOUS, ""), place.run])


def _values(environment: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    return {name: environment.get(name, "") for name in names}
