"""Checkpoint files, which are complete or do not exist, and which execute no code when they are read.

`save` writes a temporary file next to the target and renames it. So a reader, a crash, a full disk or a `kill -9` at
any moment sees the previous checkpoint or the new one, never a part of it. `load` verifies the checksums (which
`torch.load` does not) and unpickles with `weights_only=True`, so a foreign file cannot execute anything.
"""

from __future__ import annotations

import io
import os
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch

from sordino.checkpoint.values import decoded, encoded, is_number, plain_key
from sordino.errors import SordinoError, Unreadable, Unwritable, UsageError
from sordino.files import atomic_file, checked_path

_FORMAT, _FORMAT_OF_VALUES = 1, 2  # the second one is for files with values of values.py, and is newer
_MARK = "sordino_checkpoint"
_SCALARS = (str, int, float, bool, type(None))
_LAYOUTS = (torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_LONGEST = 80  # characters of a key in an error
_IS_FOLDER = 0x10  # bit in the attributes of a part of an archive
# Functions that `weights_only=True` lets a pickle call with a number of bytes to allocate. No checkpoint needs them.
_UNFOLDS = (b"c__builtin__\nbytearray\n", b"cbuiltins\nbytearray\n")
_LONGEST_INT = 2000  # bits
_KEY = "a key"
_DEEPEST = 100  # nested containers
_MOST = 50_000_000  # values; the values of a container that occurs twice count twice


def save(path: str | os.PathLike[str], state: dict[str, Any]) -> None:
    """Replace the file `path` by a checkpoint of `state`, atomically and durably.

    Args:
        path: its folder must exist and be writable.
        state: a dict of nested dicts, Counters, lists and tuples of tensors, numbers (also NumPy numbers and arrays),
            strings, booleans and None. This covers `state_dict()` of models, optimizers and schedulers, and the states
            of random generators. Parameters and buffers are tensors. Other subclasses of torch.Tensor are refused,
            because only their own code could recreate them.

    Raises:
        UsageError: `state` holds a value that `load` could not read back, or another process is writing `path`.
        Unwritable: the file cannot be written (disk full, no permission). An earlier checkpoint is unchanged.
    """
    check(state)
    plain = encoded(state)
    number = _FORMAT if plain is state else _FORMAT_OF_VALUES
    try:
        with atomic_file(path) as file:
            torch.save({_MARK: number, "state": plain}, file)
    except (SordinoError, MemoryError):
        raise
    except Exception as error:  # of torch itself, for some dtypes a KeyError
        # torch reports a failed write() as a RuntimeError about its own position; the cause is the OSError inside.
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        message = f"{path}: the checkpoint cannot be written ({cause}); an earlier checkpoint is unchanged"
        raise Unwritable(message) from error


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the `state` given to `save`, with all tensors on the CPU.

    Raises:
        UsageError: the file is missing, unreadable, truncated or damaged, or is no checkpoint of Sordino.
    """
    return decode(read(path), str(path))


def read(path: str | os.PathLike[str]) -> bytes:
    """Return the raw bytes of a checkpoint, for `decode`.

    One rank can read them and send them to ranks that cannot see the file.

    Raises:
        UsageError: the file is missing or unreadable.
    """
    source = checked_path(path)
    try:
        return source.read_bytes()
    except FileNotFoundError as error:
        raise UsageError(f"{path}: no such checkpoint") from error
    except OSError as error:
        raise Unreadable(f"{path}: the checkpoint cannot be read ({error.strerror})") from error


def decode(data: bytes, source: str) -> dict[str, Any]:
    """Return the state in the bytes of a checkpoint; `source` names them in errors.

    Raises:
        UsageError: as `load`.
    """
    # Damaged bytes make these two parsers fail in a dozen ways (BadZipFile, UnicodeDecodeError, struct.error ...),
    # which all mean the same here. Only a lack of memory is not the file's fault.
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            parts = archive.infolist()
            # The parts are not compressed, and together no longer than the file, so no file expands in memory.
            stored = all(part.compress_type == zipfile.ZIP_STORED for part in parts)
            sound = stored and sum(part.file_size for part in parts) <= len(data)
            # If a part claims to be a folder, torch reads nothing and returns uninitialized memory.
            sound = sound and not any(part.external_attr & _IS_FOLDER for part in parts)
            damaged = archive.testzip() if sound else None
    except MemoryError:
        raise
    except Exception as error:
        raise UsageError(f"{source}: truncated, damaged, or not a checkpoint ({error})") from error
    if not sound:
        raise UsageError(
            f"{source}: not a checkpoint written by sordino.checkpoint.save: its parts are compressed, overlap, or "
            "claim to be folders"
        )
    if damaged is not None:
        raise UsageError(f"{source}: damaged: the checksum of its part {damaged} is wrong")
    if any(name in data for name in _UNFOLDS):
        raise UsageError(
            f"{source}: not a checkpoint written by sordino.checkpoint.save: it creates bytes of a given length"
        )
    try:
        content = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:
        raise UsageError(f"{source}: not a checkpoint written by sordino.checkpoint.save") from error
    if not isinstance(content, dict) or _MARK not in content:
        raise UsageError(f"{source}: a torch file, but not one written by sordino.checkpoint.save")
    version = content[_MARK]
    if type(version) is not int:
        raise UsageError(f"{source}: not a checkpoint written by sordino.checkpoint.save: its format is not a number")
    if version not in (_FORMAT, _FORMAT_OF_VALUES):
        raise UsageError(
            f"{source}: format {shown(version)}; this version of Sordino reads formats up to {_FORMAT_OF_VALUES}"
        )
    state = content.get("state")
    if not isinstance(state, dict):
        raise UsageError(f"{source}: not a checkpoint written by sordino.checkpoint.save: it has no state")
    complaint = _wrong(state)
    if complaint:
        raise UsageError(f"{source}: not a checkpoint written by sordino.checkpoint.save: {complaint}; {_HOLDS}")
    if version == _FORMAT:
        return cast("dict[str, Any]", state)
    try:
        return cast("dict[str, Any]", decoded(state))
    except ValueError as error:
        raise UsageError(f"{source}: not a checkpoint written by sordino.checkpoint.save: {error}") from error


def check(state: object, besides: tuple[type, ...] = ()) -> None:
    """Raise UsageError if a state to save holds a value that a checkpoint cannot hold.

    Values of the types `besides` are allowed, because they are converted before they are saved.
    """
    complaint = _wrong(state, True, besides)
    if complaint:
        raise UsageError(f"{complaint}; {_HOLDS}")


def _wrong(state: object, attributes: bool = False, besides: tuple[type, ...] = ()) -> str | None:
    """Return a description of a value that a checkpoint cannot hold, or None.

    Otherwise `weights_only=True` would refuse the value only when the checkpoint is needed, or walking through it would
    not end.

    Args:
        state: a state to save, or one that was loaded.
        attributes: whether attributes that a script has set on tensors count, too. They are saved with the tensors.
        besides: types of values that count as scalars.
    """
    if type(state) not in (dict, OrderedDict):
        return f"state is {_kind(state)}, not a dict"
    # Containers on the path to the current value, outermost first, and the position in each. Recursion would limit the
    # depth of a file by Python's stack.
    within: list[tuple[int, Iterator[tuple[str, object]]]] = []
    places: list[str] = []
    count, value = 0, state
    while True:
        complaint = None
        inner: Iterator[tuple[str, object]] | None = None
        if isinstance(value, torch.Tensor):
            if type(value) not in (torch.Tensor, torch.nn.Parameter):
                complaint = f"is {_kind(value)}; only a plain torch.Tensor can be read again"
            elif value.device.type == "meta":
                complaint = "is on the device meta, so it has no values"
            elif value.layout not in _LAYOUTS:
                complaint = f"has the layout {value.layout}, which torch cannot write to a file"
            elif attributes and vars(value):
                inner = ((f".{name}", item) for name, item in vars(value).items())
        elif type(value) in (dict, OrderedDict, Counter):
            inner = _items(cast("dict[object, object]", value))
        elif type(value) in (list, tuple):
            inner = ((f"[{index}]", item) for index, item in enumerate(cast("list[object]", value)))
        elif is_number(value):
            if any(place.startswith(".") for place in places):
                complaint = f"is {_kind(value)}, which an attribute of a tensor must not be"
            elif _KEY in places and type(plain_key(value)) not in _SCALARS:
                complaint = f"is {_kind(value)}"
        elif type(value) not in _SCALARS:
            complaint = None if isinstance(value, besides) else f"is {_kind(value)}"
        elif isinstance(value, int) and value.bit_length() > _LONGEST_INT:
            complaint = f"has {value.bit_length():,} bits, but only {_LONGEST_INT:,} can be read again"
        if inner is not None:
            if any(id(value) == one for one, _ in within):
                complaint = "contains itself"
            elif len(within) == _DEEPEST:
                complaint = f"is in more than {_DEEPEST} containers"
            within.append((id(value), inner))
            places.append("")
        count += 1
        if count > _MOST:
            complaint = f"is one of more than {_MOST:,} values"
        if complaint:
            return f"{_named(places)} {complaint}"
        while within:
            following = next(within[-1][1], None)
            if following is not None:
                places[-1], value = following
                break
            within.pop()
            places.pop()
        else:
            return None


def _items(values: Mapping[Any, object]) -> Iterator[tuple[str, object]]:
    """Yield keys and values, each with its position."""
    for key, item in values.items():
        yield _KEY, key
        yield f"[{shown(key)}]", item


def shown(key: object) -> str:
    """Return a short form of a key for an error."""
    if type(key) not in _SCALARS or (isinstance(key, int) and key.bit_length() > 64):
        return "..."
    return repr(key[:_LONGEST] if isinstance(key, str) else key)


def _named(places: list[str]) -> str:
    """Return the name of the value at the last of these positions, for an error."""
    until = places.index(_KEY) if _KEY in places else len(places)
    return "a key of " * (until < len(places)) + f"state{''.join(places[:until])}"


def _kind(value: object) -> str:
    return f"a {type(value).__module__}.{type(value).__qualname__}"


_HOLDS = (
    "a checkpoint holds tensors, numbers and NumPy's arrays of them, strings, booleans, None, and dicts, Counters, "
    "lists and tuples of these"
)
