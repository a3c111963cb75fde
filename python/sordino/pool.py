"""Processes that work for this one, and do not outlive it."""

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
"""How they are started: threads of torch's would not survive a fork."""


@contextmanager
def pool(processes: int, begin: Callable[..., None] | None = None, *arguments: Any) -> Iterator[ProcessPoolExecutor]:
    """Start so many processes, each of which first calls `begin`. An exception in the block ends them at once."""
    with ProcessPoolExecutor(processes, mp_context=SPAWN, initializer=_depend, initargs=(begin, *arguments)) as found:
        try:
            yield found
        except BaseException:
            for process in multiprocessing.active_children():
                process.kill()
            raise


def _depend(begin: Callable[..., None] | None, *arguments: Any) -> None:
    """Leave the end of this process to the one that started it, and end it when that one is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
    if begin is not None:
        begin(*arguments)
