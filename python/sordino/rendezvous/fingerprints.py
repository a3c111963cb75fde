"""Rendezvous: the ranks of a new world first compare their settings.

A setting must be the same on all ranks if ranks would otherwise misread each other (SORDINO_CHUNK_BYTES), or if one
rank's value would silently apply to all ranks or to its node. Other settings may differ.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from sordino import _core, fingerprint
from sordino.rendezvous.notices import awaited_by_the_launcher

_SETTINGS = (
    "SORDINO_CHUNK_BYTES",  # determines the address of a chunk in shared memory
    "SORDINO_FUSION_BYTES",  # only the coordinator's value is used
    "SORDINO_GPU_ROUTE",  # a route that one rank excludes is excluded for all
    "SORDINO_RANKS_PER_NODE",  # nodes would be of different sizes
    "SORDINO_SHARED_MEMORY",  # a node shares memory only if all its ranks do
    "SORDINO_TRANSPORT",  # ranks with different transports do not meet
)


def fingerprint_of_process(dedicated: object, survive_losses: bool) -> fingerprint.Fingerprint:
    """Return the fingerprint of this process: version, MPI, settings, and the algorithm with helpers, if any."""
    found = {"Sordino": f"Sordino {_core.__version__}"}
    mpi = _core.build_info()["mpi"]
    found["MPI"] = f"Sordino built with {mpi['library']}" if mpi else "Sordino built without MPI"
    for name, alias, fallback, _ in _core.variables():
        if name in _SETTINGS:
            found[name] = f"{name}={_plain(os.environ.get(name, os.environ.get(alias, fallback)))}"
    found["on_peer_lost"] = f"on_peer_lost='{'continue' if survive_losses else 'raise'}'"
    found["algorithm"] = f"init(algorithm={dedicated})" if dedicated else "init() without helpers"
    return found


def _plain(value: str) -> str:
    """Return a setting's value, with numbers in a normal form."""
    try:
        number = float(value)
    except ValueError:
        return value or "''"
    return str(int(number)) if number.is_integer() else value


def comparing(dedicated: object, survive_losses: bool) -> tuple[str, Callable[[list[str]], None]]:
    """Return this process's fingerprint as text, and a function that raises if the texts of all ranks do not agree."""

    def compare(texts: list[str]) -> None:
        fingerprint.compare(range(len(texts)), [fingerprint.decode(text, rank) for rank, text in enumerate(texts)])

    return fingerprint.encode(fingerprint_of_process(dedicated, survive_losses)), compare


def mpi_world(
    dedicated: object, survive_losses: bool, ranks: Sequence[int] = (), fortran_handle: int | None = None
) -> _core.World:
    """Return the world of an MPI communicator, by default of all processes. Collective.

    Args:
        dedicated: an algorithm with helpers; None without one.
        survive_losses: whether ranks survive losses.
        ranks: ranks of MPI_COMM_WORLD in the world; empty: all.
        fortran_handle: Fortran handle of a communicator; None: MPI_COMM_WORLD.

    Raises:
        ConfigurationMismatch: settings differ. Raised on all ranks.
    """
    mine, compare = comparing(dedicated, survive_losses)
    with awaited_by_the_launcher(_core.mpi_initialized):
        return _core.mpi_world(
            fortran_handle=fortran_handle,
            ranks=list(ranks),
            fingerprint=mine,
            compare=compare,
            survive_losses=survive_losses,
        )
