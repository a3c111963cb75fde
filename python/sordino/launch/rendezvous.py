"""Joining a world: the first that its ranks do is to compare what they are.

Which settings must be the same: those without which ranks misread each other (SORDINO_CHUNK_BYTES), and those of which
one rank's would silently become that of all, or of its node. The others are each rank's own affair.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from sordino import _core, fingerprint
from sordino.launch.telling import awaited_by_the_launcher

_SETTINGS = (
    "SORDINO_CHUNK_BYTES",  # where peers look for a chunk in shared memory
    "SORDINO_FUSION_BYTES",  # the coordinator's counts, whatever others say
    "SORDINO_GPU_ROUTE",  # ways that one rank does not take, none takes
    "SORDINO_RANKS_PER_NODE",  # nodes would be of different sizes
    "SORDINO_SHARED_MEMORY",  # a node shares memory only if all its ranks do
    "SORDINO_TRANSPORT",  # ranks that take different ways do not meet
)


def fingerprint_of_process(dedicated: object, outlast: bool) -> fingerprint.Fingerprint:
    """Return the fingerprint of this process: version, MPI, the settings that must be the same, and who helps."""
    found = {"Sordino": f"Sordino {_core.__version__}"}
    mpi = _core.build_info()["mpi"]
    found["MPI"] = f"Sordino built with {mpi['library']}" if mpi else "Sordino built without MPI"
    for name, alias, fallback, _ in _core.variables():
        if name in _SETTINGS:
            found[name] = f"{name}={_plain(os.environ.get(name, os.environ.get(alias, fallback)))}"
    found["on_peer_lost"] = f"on_peer_lost='{'continue' if outlast else 'raise'}'"
    found["algorithm"] = f"init(algorithm={dedicated})" if dedicated else "init() without ranks that only help"
    return found


def _plain(value: str) -> str:
    """Return a setting's value, with one way to write each number."""
    try:
        number = float(value)
    except ValueError:
        return value or "''"
    return str(int(number)) if number.is_integer() else value


def comparing(dedicated: object, outlast: bool) -> tuple[str, Callable[[list[str]], None]]:
    """Return this process's fingerprint as ranks show it, and what raises where those of all do not fit together."""

    def compare(texts: list[str]) -> None:
        fingerprint.compare(range(len(texts)), [fingerprint.decode(text, rank) for rank, text in enumerate(texts)])

    return fingerprint.encode(fingerprint_of_process(dedicated, outlast)), compare


def mpi_world(
    dedicated: object, outlast: bool, ranks: Sequence[int] = (), fortran_handle: int | None = None
) -> _core.World:
    """Return the world of an MPI communicator, by default of all processes. Collective.

    Args:
        dedicated: an algorithm that gives some ranks no model.
        outlast: whether ranks go on without those that are lost.
        ranks: of MPI_COMM_WORLD.
        fortran_handle: of a communicator.

    Raises:
        ConfigurationMismatch: the processes do not fit together; on all of them.
    """
    mine, compare = comparing(dedicated, outlast)
    with awaited_by_the_launcher(_core.mpi_initialized):
        return _core.mpi_world(
            fortran_handle=fortran_handle, ranks=list(ranks), fingerprint=mine, compare=compare, outlast=outlast
        )
