"""Folder for temporary files of one job, and removal of such folders whose jobs were killed."""

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
    """Yield a new folder below `base` and a descriptor of it. The folder is removed when the block ends.

    The descriptor holds a lock, and so does every process that inherits it. A launcher that is killed with SIGKILL
    cannot remove its folder. A later launcher removes it once no process holds the lock.
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
    """Remove this user's folders below `base` whose jobs have ended."""
    for folder in base.glob(f"{_PREFIX}*"):
        # Another user's folder, or one that a job is just removing, cannot be opened or removed, and is skipped.
        with contextlib.suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                status = os.fstat(descriptor)
                # A new folder may not be locked yet.
                if status.st_uid == os.geteuid() and time.time() - status.st_mtime > _FRESH_S:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
