"""Processes that ranks start by `multiprocessing`, such as workers of a DataLoader: they are no ranks.

They inherit the variables of their rank, and run the top of its script, which may call `init()`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Iterable, Mapping, MutableMapping

from sordino import _core
from sordino.rendezvous.environment import RANK_VARIABLES, environment_of, launched_rank


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
