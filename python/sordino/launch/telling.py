"""What a rank tells `sordino run`.

It says that it waits for all others to start, that they have met, whom they go on without, and that it exits. For ranks
that are gone or stand still MPI would wait for ever, and only the launcher can end them.

`SORDINO_LAUNCHER` says where: a folder of this machine, where every word is a link (made at once or not at all, and on
a full disk, too), or `stderr:TOKEN`, where it is a line that the launcher takes out.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from sordino import _core

_rank_process = 0  # what it has started has its environment, and is no rank


@contextmanager
def awaited_by_the_launcher() -> Iterator[None]:
    """Surround what starts MPI, and tell the launcher that this rank waits, and that the ranks have met.

    Tells nothing where MPI has been started already, or no launcher listens.
    """
    if _core.mpi_initialized():
        yield
        return
    global _rank_process
    _rank_process = os.getpid()
    mine = int(os.environ.get("OMPI_COMM_WORLD_RANK", 0))
    _tell("waits", mine)
    try:
        yield
    finally:
        if _core.mpi_initialized():  # also if the ranks do not fit together
            _tell("met", mine)


def tell_of_the_lost(identities: Iterable[int], identity: int, started: int) -> None:
    """Say that the others go on without some ranks, which may still run and have no part in the job any more.

    Args:
        identities: their numbers in the first world.
        identity: this rank's there.
        started: how many there were. The launcher knows the ranks by these numbers only if that were all of its own.
    """
    numbers = {"OMPI_COMM_WORLD_RANK": identity, "OMPI_COMM_WORLD_SIZE": started}
    if all(os.environ.get(name) == str(number) for name, number in numbers.items()):
        for lost in identities:
            _tell("left", lost)


def tell_of_the_exit() -> None:
    """Say that this process has nothing more to do, and will end as soon as MPI lets it."""
    if os.getpid() == _rank_process:
        _tell("exits", int(os.environ.get("OMPI_COMM_WORLD_RANK", 0)))


def _tell(word: str, rank: int) -> None:
    where = os.environ.get("SORDINO_LAUNCHER")
    if where is None:
        return
    scheme, _, token = where.partition(":")
    if scheme == "stderr":
        os.write(2, f"\x1e{token} {rank} {word} {os.getpid()}\n".encode())
    else:
        with contextlib.suppress(OSError):  # another rank has said so, or the job is over
            os.symlink(str(os.getpid()), f"{where}/{word}.{rank}")
