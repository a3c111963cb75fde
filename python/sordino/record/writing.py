"""Writer of records. A line is in the file when `write` returns, so it survives the death of this process."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sordino
from sordino.errors import UsageError
from sordino.files import checked_path
from sordino.log import logger
from sordino.record import FORMAT, JOB, RANK

_log = logger(__name__)
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


def jsonable(value: Any) -> Any:
    """Return a value as JSON types: None for numbers that are not finite, text for values without such a type."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): jsonable(one) for key, one in value.items()}
    if isinstance(value, (Sequence, set, frozenset)):
        return [jsonable(one) for one in value]
    return str(value)


class Lines:
    """File of a record, to which lines are appended.

    The file may exist from an earlier start of the job. If a kill has left an incomplete line there, new lines begin
    after it. If the file cannot be written any more (disk full), this is logged once and training continues.

    Args:
        path: path of the file. Its folder is made.

    Raises:
        UsageError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise UsageError(f"the record {path} cannot be written: {error.strerror}; name another folder") from error
        size = os.fstat(self._file).st_size
        self._torn = size > 0 and os.pread(self._file, 1, size - 1) != b"\n"

    def write(self, kind: str, **values: Any) -> None:
        """Append a line of this kind. After an error this does nothing."""
        if self._file < 0:
            return
        line = _ENCODER.encode({"kind": kind, **values}) + "\n"
        data = b"\n" * self._torn + line.encode()
        self._torn = False
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            _log.error("the record %s ends here: %s", self.path, error.strerror)
            self.close()

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


@contextmanager
def removed_after_error(files: Sequence[Lines]) -> Iterator[None]:
    """Remove these new files if the block raises, so that their folders can be used again.

    Args:
        files: the files, including files that the block appends to this list.
    """
    try:
        yield
    except BaseException:
        for file in files:
            file.close()
            file.path.unlink(missing_ok=True)
        raise


def job_file(folder: str | os.PathLike[str], what: str, **values: Any) -> Lines:
    """Return the job's file of a new record, with its first line.

    Args:
        folder: folder of the record.
        what: "training", "simulation" or "plan".
        **values: values of the first line, of JSON types.

    Raises:
        UsageError: there is a record already, or the folder cannot be written.
    """
    path = checked_path(folder) / JOB
    if path.exists() or any(path.parent.glob("rank-*.jsonl")):
        raise UsageError(f"{folder} holds the record of another run; name another folder, or remove it")
    file = Lines(path)
    file.write("job", format=FORMAT, version=sordino.__version__, what=what, time=time.time(), **values)
    return file


def open_rank_file(folder: str | os.PathLike[str], rank: int) -> Lines:
    """Return the file of a rank, or virtual worker."""
    return Lines(checked_path(folder) / RANK.format(rank))


def begin_rank(file: Lines, rank: int, **values: Any) -> None:
    """Write the line with which each start of a rank, or virtual worker, begins."""
    file.write("rank", format=FORMAT, version=sordino.__version__, rank=rank, **values)


def rank_file(folder: str | os.PathLike[str], rank: int, **values: Any) -> Lines:
    """Return the file of a rank, or virtual worker, and write its first line."""
    file = open_rank_file(folder, rank)
    begin_rank(file, rank, **values)
    return file
