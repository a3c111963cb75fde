"""Checkpoints that are whole or not there, and that run no code when they are read.

`save` writes beside the target and renames: a reader, a crash, a full disk or a `kill -9` at any moment sees the
previous checkpoint or the new one, never a part of it. `load` verifies the checksums (which `torch.load` does not)
and unpickles with `weights_only=True`, so a foreign file cannot execute anything.
"""

from __future__ import annotations

import fcntl
import io
import os
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from sordino.errors import SordinoError, UsageError

_FORMAT = 1
_MARK = "sordino_checkpoint"
_SCALARS = (str, int, float, bool, type(None))


def save(path: str | os.PathLike[str], state: dict[str, Any]) -> None:
    """Replaces the file `path` by a checkpoint of `state`, atomically and durably.

    Args:
        path: its folder must exist and be writable.
        state: nested dicts, lists and tuples of tensors, numbers, strings, booleans and None (what `state_dict()`
            of models and optimizers gives).

    Raises:
        UsageError: `state` holds something that `load` could not read back, or another process is writing `path`.
        SordinoError: the file cannot be written (disk full, no permission); an earlier checkpoint is untouched.
    """
    _check(state, "state")
    try:
        with atomic_file(path) as file:
            torch.save({_MARK: _FORMAT, "state": state}, file)
    except (OSError, RuntimeError) as error:
        if isinstance(error, SordinoError):
            raise
        # torch reports a failed write() as a RuntimeError about its own position; the cause is the OSError inside.
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        message = f"{path}: the checkpoint cannot be written ({cause}); an earlier one is untouched"
        raise SordinoError(message) from error


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The `state` given to `save`, with all tensors on the CPU.

    Raises:
        UsageError: the file is missing, unreadable, truncated, damaged, or no checkpoint of Sordino.
    """
    return decode(read(path), str(path))


def read(path: str | os.PathLike[str]) -> bytes:
    """The raw bytes of a checkpoint, for `decode`: what one rank reads and sends to those that cannot see the file.

    Raises:
        UsageError: the file is missing or unreadable.
    """
    try:
        return Path(path).read_bytes()
    except FileNotFoundError as error:
        raise UsageError(f"{path}: no such checkpoint") from error
    except OSError as error:
        raise UsageError(f"{path}: the checkpoint cannot be read ({error.strerror})") from error


def decode(data: bytes, source: str) -> dict[str, Any]:
    """The state in the bytes of a checkpoint; `source` names them in errors.

    Raises:
        UsageError: as `load`.
    """
    # Damaged bytes break these two parsers in a dozen ways (BadZipFile, UnicodeDecodeError, struct.error ...), which
    # all mean the same here; only a lack of memory is not the file's fault.
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            damaged = archive.testzip()
    except MemoryError:
        raise
    except Exception as error:
        raise UsageError(f"{source}: truncated, damaged, or not a checkpoint ({error})") from error
    if damaged is not None:
        raise UsageError(f"{source}: damaged: the checksum of its part {damaged} is wrong")
    try:
        content = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:
        raise UsageError(f"{source}: not a checkpoint written by sordino.checkpoint.save") from error
    if not isinstance(content, dict) or _MARK not in content:
        raise UsageError(f"{source}: a torch file, but not one written by sordino.checkpoint.save")
    if content[_MARK] != _FORMAT:
        raise UsageError(f"{source}: format {content[_MARK]}; this version of Sordino reads format {_FORMAT}")
    return cast("dict[str, Any]", content["state"])


@contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A binary file to write to, which becomes `path` when the block ends, and vanishes when it raises.

    Raises:
        UsageError: another process is writing the same `path` at this moment.
        OSError: as `open` and `write` do.
    """
    target = Path(path).resolve()  # A link to a checkpoint goes on being a link.
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
    """A descriptor of `path` for writing, locked; the lock ends with the descriptor, or with the process."""
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


def _check(value: object, where: str) -> None:
    """Refuses at once what `weights_only=True` would refuse when the checkpoint is needed."""
    if isinstance(value, torch.Tensor) or type(value) in _SCALARS:
        return
    if type(value) in (dict, OrderedDict):
        for key, item in cast("dict[object, object]", value).items():
            _check(key, f"a key of {where}")
            _check(item, f"{where}[{key!r}]")
    elif type(value) in (list, tuple):
        for index, item in enumerate(cast("list[object]", value)):
            _check(item, f"{where}[{index}]")
    else:
        raise UsageError(
            f"{where} is a {type(value).__module__}.{type(value).__qualname__}; a checkpoint holds tensors, numbers, "
            "strings, booleans, None, and dicts, lists and tuples of these"
        )
