"""State of the ranks in this process."""

from __future__ import annotations

import os
import socket
import sys
import threading
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

from sordino.runtime.context import Context, living_contexts

_POLLED_WITHIN_S = 0.4  # a waiting rank looks for questions every 10 ms, an idle one every 50 ms


def state() -> dict[str, Any]:
    """Return the state of this process, in JSON types.

    Returns:
        pid, host, command; worlds (see `_world`); threads: name and stack of each thread, the main thread first. A
        stack is a list of file, line, function and line of code, the innermost call last.
    """
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "command": sys.orig_argv,
        "worlds": [_world(context) for context in living_contexts()],
        "threads": _threads(),
    }


def _world(context: Context) -> dict[str, Any]:
    """Return the state of one rank of one world.

    Returns:
        job: text that is the same on all ranks of the job. places: host and process id of each rank. waits: pending
        operations, as `World.waits` returns them; None if no thread of this process polls for them.
    """
    world = context.world
    places = [[world.host(rank), world.process(rank)] for rank in range(world.size)]
    waits = world.waits(_POLLED_WITHIN_S)
    return {
        "job": context.job_id,
        "rank": world.rank,
        "size": world.size,
        "places": places,
        "transport": world.transport,
        "failed": world.failed,
        "counters": world.stats,
        "waits": None if waits is None else [list(wait) for wait in waits],
    }


def _threads() -> list[dict[str, Any]]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    frames.pop(threading.get_ident(), None)  # the thread that answers
    main = threading.main_thread().ident
    ordered = sorted(frames.items(), key=lambda item: item[0] != main)
    return [{"name": names.get(ident, f"thread {ident}"), "stack": _stack(frame)} for ident, frame in ordered]


def _stack(frame: FrameType) -> list[list[Any]]:
    found = traceback.extract_stack(frame)
    return [[_short(one.filename), one.lineno, one.name, one.line or ""] for one in found]


def _short(path: str) -> str:
    """Return a path relative to the working directory if it lies there."""
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except (ValueError, OSError):
        return path
