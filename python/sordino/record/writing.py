"""Lines of JSON that are in the file when `write` returns, whatever becomes of this process afterwards."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
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
    """Return a value of JSON's types: None for what is not finite, text for what has no such type."""
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
    """One file of a record, which grows by a line at a time.

    It may be there from an earlier start of the job; what a kill has left of a line there stays a line by itself. When
    it cannot be written any more (a full disk) that is said once, and training goes on.

    Args:
        path: of the file; its folder is made.

    Raises:
        UsageError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise UsageError(f"the record {path} cannot be written: {error.strerror}; name another folder") from error
        size = os.fstat(self._file).st_size
        if size > 0 and os.pread(self._file, 1, size - 1) != b"\n":
            os.write(self._file, b"\n")

    def write(self, kind: str, **values: Any) -> None:
        """Append a line of this kind."""
        if self._file < 0:
            return
        line = _ENCODER.encode({"kind": kind, **values}) + "\n"
        data = line.encode()
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            _log.error("the record %s ends here: %s", self.path, error.strerror)
            self.close()

    def close(self) -> None:
        """Write no more. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def job_file(folder: str | os.PathLike[str], what: str, **values: Any) -> Lines:
    """Return the file of a job whose record begins in `folder`, with its first line.

    Args:
        folder: of the record.
        what: "training", "simulation" or "plan".
        **values: of the first line, of JSON's types.

    Raises:
        UsageError: there is a record already, or none can be written there.
    """
    path = checked_path(folder) / JOB
    if path.exists():
        raise UsageError(f"{folder} holds the record of another run; name another folder, or remove it")
    file = Lines(path)
    file.write("job", format=FORMAT, version=sordino.__version__, what=what, time=time.time(), **values)
    return file


def rank_file(folder: str | os.PathLike[str], rank: int, **values: Any) -> Lines:
    """Return the file of a rank, or virtual worker, with the line that each start of it begins with."""
    file = Lines(checked_path(folder) / RANK.format(rank))
    file.write("rank", format=FORMAT, version=sordino.__version__, rank=rank, **values)
    return file
