"""A folder for what one job leaves behind, and the removal of those whose jobs were killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "sordino-run-"
_FRESH_S = 60.0


@contextlib.contextmanager
def scratch(base: Path) -> Iterator[tuple[Path, int]]:
    """Make a new folder below `base` and a descriptor of it; the folder is removed when the block ends.

    The descriptor holds a lock, and so does every process that inherits it. A launcher that is killed with SIGKILL
    cannot remove its folder; the next one does, as soon as nobody holds the lock.
    """
    sweep(base)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield folder, descriptor
    finally:
        os.close(descriptor)
        shutil.rmtree(folder, ignore_errors=True)


def sweep(base: Path) -> None:
    """Remove the folders of this user below `base` whose jobs are gone."""
    for folder in base.glob(f"{_PREFIX}*"):
        # Another user's folder, or one that a job removes at this moment, cannot be opened or removed, and need not be.
        with contextlib.suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                status = os.fstat(descriptor)
                # One just made may not be locked yet.
                if status.st_uid == os.geteuid() and time.time() - status.st_mtime > _FRESH_S:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
