"""Whether somebody watches, and a bar for them; files get plain lines instead."""

from __future__ import annotations

import os
import stat
import sys

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn


def watched() -> bool:
    """Return whether a person sees this process's output, rather than a file or a pipe.

    Under mpirun `isatty` says nothing: Open MPI gives every rank a pseudo-terminal, even if its own output goes to a
    file. `sordino run` says so in TTY_COMPATIBLE; under a plain mpirun we look at what its output is.
    """
    said = os.environ.get("TTY_COMPATIBLE")
    if said in ("0", "1"):
        return said == "1"
    if not sys.stdout.isatty():
        return False
    if "OMPI_COMM_WORLD_RANK" not in os.environ:
        return True
    try:
        return stat.S_ISCHR(os.stat(f"/proc/{os.getppid()}/fd/1").st_mode)
    except OSError:
        return False


def bar(*columns: ProgressColumn) -> Progress | None:
    """Return a bar for who watches: title, bar, these columns and the time left; None if nobody does."""
    if not watched():
        return None
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *columns,
        TimeRemainingColumn(),
        console=Console(force_terminal=True),
    )
