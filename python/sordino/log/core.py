"""Thread that hands log lines of the C++ core to the logger `sordino.core` (the core's side is csrc/base/log.h).

The thread waits in the core, without the GIL, from the first `init()` until the process ends. No line is lost:

| when | a pending line |
|---|---|
| the thread cannot run for 1 s, because a call holds the GIL | the core writes it to stderr; handlers get it later |
| `shutdown()` | `flush()` hands it over before `shutdown()` returns |
| exit, an uncaught error | `finish()` hands it over; later lines go to stderr at once |
| a handler does not return for 1 s at exit | `finish()` writes it to stderr |
| a forked child | belongs to the parent; lines of the child go to stderr at once |
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import traceback

from sordino import _core
from sordino.log import NAME, logger

_PATIENCE_S = 1.0  # longest wait for a handler that runs in another thread

_log = logger(f"{NAME}.core")
_starting = threading.Lock()
_handing = threading.RLock()  # held from taking a line until handlers have it; RLock: a handler may call shutdown()
_thread: threading.Thread | None = None
_registered = False


def listen() -> None:
    """Set the logger's level from SORDINO_LOG_LEVEL, and start to hand the core's lines to it. Idempotent.

    Raises:
        UsageError: SORDINO_LOG_LEVEL, or another variable, has a bad value.
    """
    global _thread, _registered
    level = _core.log_level()
    if level:
        logging.getLogger(NAME).setLevel(level)
    with _starting:
        _core.open_log(_log.getEffectiveLevel())
        if _thread is None:
            _thread = threading.Thread(target=_hand_over_until_closed, name="sordino-log", daemon=True)
            _thread.start()
        if not _registered:
            _registered = True
            atexit.register(finish)
            os.register_at_fork(after_in_child=_forget)


def flush() -> None:
    """Hand over all pending lines. If a handler does not return within 1 s, the rest follows later."""
    _hand_over_if_free()


def finish() -> None:
    """Hand over all pending lines at the end of the process. From now on the core writes to stderr."""
    _core.close_log()
    if not _hand_over_if_free():
        while (line := _core.take_log_line()) is not None:
            _write(line)
    if _thread is not None and _thread is not threading.current_thread():
        _thread.join(_PATIENCE_S)  # the thread must leave the core before the interpreter ends


def _hand_over_until_closed() -> None:
    while _core.wait_for_log_line():
        with _handing:
            _hand_over()


def _hand_over_if_free() -> bool:
    """Hand over all pending lines. Return False if a handler keeps another thread busy for 1 s."""
    if not _handing.acquire(timeout=_PATIENCE_S):
        return False
    try:
        _hand_over()
    finally:
        _handing.release()
    return True


def _hand_over() -> None:
    while (line := _core.take_log_line()) is not None:
        level, rank, text, on_stderr = line
        if not _log.isEnabledFor(level):
            continue
        extra = {"rank": rank, "on_stderr": on_stderr}
        try:
            _log.handle(_log.makeRecord(_log.name, level, "(core)", 0, text, (), None, extra=extra))
        except BaseException as error:  # from a filter or a handler, or Ctrl-C
            _write(line)
            if not isinstance(error, Exception):
                raise
            traceback.print_exc()


def _write(line: tuple[int, int, str, bool]) -> None:
    _, _, text, on_stderr = line
    if not on_stderr:
        os.write(2, f"sordino: {text}\n".encode(errors="replace"))


def _forget() -> None:
    """Reset the state in a forked child: it has no thread, and needs locks that no thread of the parent holds."""
    global _thread, _starting, _handing
    _thread, _starting, _handing = None, threading.Lock(), threading.RLock()
