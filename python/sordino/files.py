"""Atomic files: written under a temporary name in the same folder, then renamed. So no reader sees a part of a file."""

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
    """Open a binary file for writing. It becomes `path` when the block ends, and is removed if the block raises.

    Raises:
        UsageError: another process is writing the same `path`, or `path` is not valid (`checked_path`).
        OSError: as `open` and `write` do.
    """
    target = checked_path(path).resolve()  # a link to a checkpoint stays a link
    # One fixed name, so that the next writer reuses the file that a killed writer left.
    temporary = target.with_name(f".{target.name}.tmp")
    with open(_lock(temporary), "wb") as file:  # open() of a descriptor does not truncate
        try:
            file.truncate(0)
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    # Without an fsync of the folder, a power cut may undo the rename, although the data is on the disk.
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _lock(path: Path) -> int:
    """Open `path` for writing, and lock it. The lock ends with the returned descriptor, or with the process.

    Raises:
        UsageError: another process is writing the file.
    """
    while True:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            if _locks(descriptor, path):
                return descriptor
        except BaseException as error:
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                raise UsageError(f"{path}: another process is writing this file") from None
            raise
        os.close(descriptor)


def _locks(descriptor: int, path: Path) -> bool:
    """Lock an open file. Return whether it is still at `path`: a writer may have removed it, or moved it to its target.

    Raises:
        BlockingIOError: another process has locked it.
    """
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def remove_leftover(temporary: Path) -> None:
    """Remove a temporary file of `atomic_file`, unless a process is writing it. Raises OSError in that case."""
    descriptor = os.open(temporary, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if _locks(descriptor, temporary):
            temporary.unlink()
    finally:
        os.close(descriptor)


def checked_path(path: str | os.PathLike[str]) -> Path:
    """Return `path` as a Path. Raises UsageError unless it is text without NUL characters."""
    if not isinstance(os.fspath(path) if isinstance(path, os.PathLike) else path, str):
        given = f"{type(path).__module__}.{type(path).__qualname__}"
        raise UsageError(f"a path must be a str or a pathlib.Path, not a {given}")
    if "\0" in str(path):
        raise UsageError(f"{str(path)!r}: a path must not contain a NUL character; remove it")
    return Path(path)
