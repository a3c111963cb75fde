"""What a rank tells `sordino run`.

It says that it waits for all others to start, that they have met, which ranks they go on without, that an error of its
own ends it, and that it exits. For ranks that are gone or stand still the others would wait at the start or at the end,
and only the launcher can end them.

`SORDINO_LAUNCHER` says where: a folder of this machine, where every word is a link (made at once or not at all, and on
a full disk, too), or `stderr:TOKEN`, where it is a line that the launcher takes out.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

# By these a rank knows its number at the launcher, and how many there were: of `sordino run`, of Open MPI's mpirun.
_NUMBERS = (("SORDINO_RANK", "SORDINO_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"))
_rank_process = 0  # what it has started has its environment, and is no rank


@contextmanager
def awaited_by_the_launcher(met: Callable[[], bool]) -> Iterator[None]:
    """Surround what has this rank meet the others, and tell the launcher that it waits, and that they have met.

    Tells nothing where they have met already, or no launcher listens.

    Args:
        met: whether the ranks have met. They have, too, if they do not fit together.
    """
    if met():
        yield
        return
    global _rank_process
    _rank_process = os.getpid()
    _tell("waits", _own_number())
    try:
        yield
    finally:
        if met():
            _tell("met", _own_number())


def _own_number() -> int:
    return next((int(os.environ[rank]) for rank, _ in _NUMBERS if os.environ.get(rank)), 0)


def tell_of_the_lost(identities: Iterable[int], identity: int, started: int) -> None:
    """Say that the others go on without some ranks, which may still run and have no part in the job any more.

    Args:
        identities: their numbers in the first world.
        identity: this rank's there.
        started: how many there were. The launcher knows the ranks by these numbers only if that were all of its own.
    """
    known = ((os.environ.get(rank), os.environ.get(size)) for rank, size in _NUMBERS)
    if (str(identity), str(started)) in known:
        for lost in identities:
            _tell("left", lost)


def tell_of_the_failure() -> None:
    """Say that an error of this rank's own ends it, before the others fail because of that."""
    if os.getpid() == _rank_process:
        _tell("fails", _own_number())


def tell_of_the_exit() -> None:
    """Say that this process has nothing more to do, and will end as soon as MPI lets it."""
    if os.getpid() == _rank_process:
        _tell("exits", _own_number())


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
