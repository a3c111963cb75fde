"""Notices from a rank to `sordino run`.

| word | meaning |
|---|---|
| waits | this rank waits for all others to start |
| survives | this rank survives the loss of other ranks, so the launcher lets it continue then |
| met | the ranks have met |
| left | the remaining ranks continue without the given rank |
| fails | an error of this rank ends it |
| exits | this rank exits |
| departs | this rank leaves a job that continues, or came too late: its exit status says nothing about the job |

Without notices, ranks could wait forever, at the start or the end, for ranks that are gone or stopped. Only the
launcher can end such a wait.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from sordino.rendezvous.wire import Message, send

# Environment variables of the rank and the number of ranks, as set by `sordino run` and by Open MPI's mpirun.
_NUMBERS = (("SORDINO_RANK", "SORDINO_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"))
_rank_process = 0  # id of the rank's process; its children have its environment, but are not ranks


@contextmanager
def awaited_by_the_launcher(met: Callable[[], bool], survives_losses: bool = False) -> Iterator[None]:
    """Tell the launcher before the block that this rank waits, and after it that the ranks have met in the block.

    Sends nothing if they have met before the block, or if no launcher listens.

    Args:
        met: returns whether the ranks have met, even if a comparison of their settings has failed.
        survives_losses: whether this rank survives losses.
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
            if survives_losses:
                _tell("survives", _own_number())
            _tell("met", _own_number())


def tell_of_the_joining() -> None:
    """Tell the launcher that this process, which joins the running job, has met the others."""
    global _rank_process
    _rank_process = os.getpid()
    _tell("met", _own_number())


def tell_of_the_departure() -> None:
    """Tell the launcher that this process leaves a job that continues, or that the job ended before it could join."""
    _tell("departs", _own_number())


def _own_number() -> int:
    return next((int(os.environ[rank]) for rank, _ in _NUMBERS if os.environ.get(rank)), 0)


def tell_of_the_lost(identities: Iterable[int], identity: int, started: int) -> None:
    """Tell the launcher which ranks are lost. They may still run, but are no longer part of the job.

    Args:
        identities: numbers of the lost ranks in the first world.
        identity: number of this rank in the first world.
        started: size of the first world. Only a launcher that started exactly these ranks numbers them alike.
    """
    known = ((os.environ.get(rank), os.environ.get(size)) for rank, size in _NUMBERS)
    if (str(identity), str(started)) in known:
        for lost in identities:
            _tell("left", lost)


def tell_of_the_failure() -> None:
    """Tell the launcher that an error ends this rank, before other ranks fail because of the error."""
    if os.getpid() == _rank_process:
        _tell("fails", _own_number())


def tell_of_the_exit() -> None:
    """Tell the launcher that this process has finished its program. It ends once MPI lets it end."""
    if os.getpid() == _rank_process:
        _tell("exits", _own_number())


def _tell(word: str, rank: int) -> None:
    if (where := os.environ.get("SORDINO_LAUNCHER")) is not None:
        with contextlib.suppress(OSError):  # another rank has sent this notice, or the job is over
            send(where, Message(rank, word, os.getpid()))
