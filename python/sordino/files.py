"""Files that are whole or not there: written beside the target, and renamed."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from sordino.errors import UsageError


@contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a binary file to write to, which becomes `path` when the block ends, and vanishes when it raises.

    Raises:
        UsageError: another process is writing the same `path` at this moment, or no file can have that name.
        OSError: as `open` and `write` do.
    """
    target = checked_path(path).resolve()  # A link to a checkpoint goes on being a link.
    # One fixed name, so that what a killed writer left is taken over by the next one instead of piling up.
    temporary = target.with_name(f".{target.name}.tmp")
    with open(_lock(temporary), "wb") as file:  # Of a descriptor, open() truncates nothing.
        try:
            file.truncate(0)
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    # Without this a power cut may undo the rename, although the data is on the disk.
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _lock(path: Path) -> int:
    """Return a descriptor of `path` for writing, locked; the lock ends with the descriptor, or with the process."""
    while True:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise UsageError(f"{path}: another process is writing this file") from None
        except FileNotFoundError:
            pass
        # Between open and lock another writer renamed this file to its target: it is not ours to truncate.
        os.close(descriptor)


def checked_path(path: str | os.PathLike[str]) -> Path:
    """Return a path that a file may have. UsageError for what is none."""
    if not isinstance(os.fspath(path) if isinstance(path, os.PathLike) else path, str):
        given = f"{type(path).__module__}.{type(path).__qualname__}"
        raise UsageError(f"the path of a checkpoint must be a str or a pathlib.Path, not a {given}")
    if "\0" in str(path):
        raise UsageError(f"{str(path)!r}: no path has a NUL character in it; take it out")
    return Path(path)
