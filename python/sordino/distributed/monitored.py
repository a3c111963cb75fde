"""Monitored barrier: a barrier whose error names the ranks that have not come.

The ranks meet at torch's store, not by operations. So the barrier also works where operations hang, and its error does
not end the group.

    rank r > 0    sets "r", then waits for "verdict"
    rank 0        waits for "1", "2", ..., then sets "verdict": empty, or the reason why the barrier has failed

The texts of the errors begin as those of gloo, for programs that look for them.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

from sordino.awake import LONGEST_STEP_S, Deadline

_VERDICT = "verdict"
_LEAST_S = 1e-3  # 0 ms would mean no limit to a store


def barrier(store: Any, rank: int, size: int, timeout: timedelta, wait_all_ranks: bool) -> None:
    """Wait until all ranks of a group have called this. Collective.

    Args:
        store: a torch.distributed.Store for this barrier alone.
        rank: rank of this process in the group.
        size: number of ranks of the group.
        timeout: time limit.
        wait_all_ranks: whether rank 0 waits for all ranks and names all that are missing, or only the first one.

    Raises:
        RuntimeError: ranks have not come in time; rank 0's error names them.
    """
    if rank == 0:
        _wait_for_others(store, size, timeout, wait_all_ranks)
        return
    store.set(str(rank), b"")
    reached = f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv from"
    if not _is_set(store, _VERDICT, Deadline(timeout.total_seconds())):
        raise RuntimeError(f"{reached} rank 0: rank 0 has not come within {_text(timeout)}")
    verdict = bytes(store.get(_VERDICT)).decode()
    if verdict:
        raise RuntimeError(f"{reached} rank 0: {verdict}")


def _wait_for_others(store: Any, size: int, timeout: timedelta, wait_all_ranks: bool) -> None:
    deadline = Deadline(timeout.total_seconds())
    missing: list[int] = []
    for rank in range(1, size):
        if not _is_set(store, str(rank), deadline):
            missing.append(rank)
            if not wait_all_ranks:
                break
    if missing and timeout <= timedelta(0):
        verdict = f"Rank 0 timed out in monitoredBarrier after {_text(timeout)}"
    elif missing:
        names = f"Rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        verdict = f"{names} failed to pass monitoredBarrier in {_text(timeout)}"
    else:
        verdict = ""
    store.set(_VERDICT, verdict.encode())
    if verdict:
        raise RuntimeError(verdict)


def _is_set(store: Any, key: str, deadline: Deadline) -> bool:
    """Wait for a key, and return whether it has been set by the deadline.

    Time in which this process is stopped does not count, so this asks again when the store's own time limit has passed.
    """
    while not store.check([key]):
        left = deadline.left()
        if left <= _LEAST_S:
            return False
        with suppress(RuntimeError):  # the time has passed; or the store is gone, so check() will raise
            store.wait([key], timedelta(seconds=max(min(left, LONGEST_STEP_S / 2), 2 * _LEAST_S)))
    return True


def _text(timeout: timedelta) -> str:
    return f"{timeout.total_seconds() * 1e3:.0f} ms"
