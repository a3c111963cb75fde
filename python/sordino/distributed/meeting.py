"""`init_process_group("sordino", init_method="sordino://")`: the ranks of `sordino run`, or of a launcher for torch."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed

from sordino import _core
from sordino.errors import UsageError
from sordino.rendezvous.environment import RENDEZVOUS, launched_rank

dist: Any = torch.distributed  # its annotations lack much of what a backend uses


def meet(timeout: timedelta | None = None, **_: Any) -> tuple[Any, int, int]:
    """Return a store of all ranks, this rank and the number of ranks.

    Raises:
        UsageError: MPI's launcher has started several ranks, which have no store; or launchers contradict each other.
    """
    mpi_size, variable = _core.launcher()
    place = launched_rank(os.environ, mpi_size, variable)
    if place is None:
        if mpi_size > 1:
            raise UsageError(
                f"init_method='sordino://': {variable}={mpi_size}: MPI's launcher has started the ranks, and gives "
                "them no store. Set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT and leave init_method away; or start "
                "the script with `sordino run --launcher local` or torchrun"
            )
        return dist.HashStore(), 0, 1
    if place.address is None:
        return dist.FileStore(os.environ[RENDEZVOUS] + ".store", place.size), place.rank, place.size
    given = {} if timeout is None else {"timeout": timeout}
    store, rank, size = next(dist.rendezvous("env://", **given))
    return store, rank, size
