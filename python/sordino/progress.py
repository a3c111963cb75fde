"""Progress bar for terminals. Output to files has plain lines instead."""

from __future__ import annotations

import os
import stat
import sys

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn


def watched() -> bool:
    """Return whether this process's output goes to a terminal, rather than to a file or a pipe.

    Under mpirun `isatty` is unreliable: Open MPI gives every rank a pseudo-terminal, even if mpirun's own output goes
    to a file. `sordino run` sets TTY_COMPATIBLE. Without it, under mpirun, mpirun's own output is checked.
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
    """Return a progress bar (title, bar, `columns`, time left); None if the output is not a terminal."""
    if not watched():
        return None
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *columns,
        TimeRemainingColumn(),
        console=Console(force_terminal=True),
    )
