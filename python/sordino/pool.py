"""Pool of worker processes that end with this process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

SPAWN = multiprocessing.get_context("spawn")
"""Context that starts the workers. It spawns, because torch's threads would not survive a fork."""


@contextmanager
def pool(processes: int, begin: Callable[..., None] | None = None, *arguments: Any) -> Iterator[ProcessPoolExecutor]:
    """Start `processes` workers that first call `begin(*arguments)`. An exception in the block kills them."""
    with ProcessPoolExecutor(processes, mp_context=SPAWN, initializer=_depend, initargs=(begin, *arguments)) as found:
        try:
            yield found
        except BaseException:
            for process in multiprocessing.active_children():
                process.kill()
            raise


def _depend(begin: Callable[..., None] | None, *arguments: Any) -> None:
    """Tie this worker to its parent process: ignore Ctrl-C, which the parent handles, and exit when the parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
    if begin is not None:
        begin(*arguments)
