"""Logging: the logger `sordino`, its children, and a default handler for scripts that install none.

Every module takes its logger from `logger(__name__)`. `sordino.log.core` passes lines of the C++ core to the logger
`sordino.core`. Each record has an attribute `rank`: the rank that logs it, or -1 outside of a world.

The usual rules of `logging` hold: lines propagate to the root logger, and levels and handlers that the script sets
apply. A line that reaches no handler of the script goes to stderr as "sordino: text". This is decided for each line. So
a script may call `logging.basicConfig()` before or after `import sordino`, and no line is printed twice.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

NAME = "sordino"
NO_RANK = -1

_find_rank: Callable[[], int] | None = None


def logger(name: str) -> logging.Logger:
    """Return the logger of a module. Its records have the attribute `rank`.

    A logging call may set another rank: `extra={"rank": 3}`.
    """
    one = logging.getLogger(name)
    one.addFilter(_add_rank)
    return one


def find_rank_by(find: Callable[[], int]) -> None:
    """Set the function that returns the rank of the calling thread, or `NO_RANK` outside of a world."""
    global _find_rank
    _find_rank = find


def _add_rank(record: logging.LogRecord) -> bool:
    if not hasattr(record, "rank"):
        record.rank = NO_RANK if _find_rank is None else _find_rank()
    return True


class _DefaultHandler(logging.Handler):
    """Handler that prints a record to the current sys.stderr, unless another handler gets it or the core printed it."""

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "on_stderr", False) or self._has_another(record.name):
            return
        try:
            sys.stderr.write(self.format(record) + "\n")  # in one write, so that processes do not mix their lines
            sys.stderr.flush()
        except Exception:
            self.handleError(record)

    def _has_another(self, name: str) -> bool:
        """Return whether another handler gets the records of a logger."""
        one: logging.Logger | None = logging.getLogger(name)
        while one is not None:
            if any(handler is not self for handler in one.handlers):
                return True
            one = one.parent if one.propagate else None
        return False


def _add_default_handler() -> None:
    handler = _DefaultHandler()
    handler.setFormatter(logging.Formatter("sordino: %(message)s"))
    logger(NAME).addHandler(handler)


_add_default_handler()
