"""Reader of records, including growing ones: each update reads the complete lines that were added to a file.

An incomplete line that a kill has left is skipped and counted. A rank whose last line is neither "end" nor "error" was
killed, or is still running.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sordino.errors import NotBuilt, Unreadable, UsageError
from sordino.record import FORMAT, JOB

Line = dict[str, Any]
_MAKE_ONE = "make one with: sordino run --record DIR -np 4 -- python train.py"


@dataclass
class Rank:
    """Lines that one rank, or virtual worker, has written, in the order of writing.

    Attributes:
        rank: number of the rank in the first world.
        lines: lines by their kind.
        last: kind of the last line.
    """

    rank: int
    lines: dict[str, list[Line]] = field(default_factory=dict)
    last: str = ""

    def of(self, kind: str) -> list[Line]:
        """Return the lines of a kind."""
        return self.lines.get(kind, [])

    def add(self, line: Line) -> None:
        """Add a line, and note in it which start of the job it belongs to.

        A start without a number of its own, as of another job in the same folder, counts as the next one.
        """
        started = self.of("rank")
        before = started[-1]["start"] if started else -1
        if line["kind"] == "rank":
            line["start"] = max(int(line.get("start", 0)), before + 1)
        else:
            line.setdefault("start", max(before, 0))
        self.last = line["kind"]
        self.lines.setdefault(self.last, []).append(line)


@dataclass
class Run:
    """A record.

    Attributes:
        name: name of the record's folder.
        job: lines of the job, by their kind: "job" (the first), "start", "end", "result".
        ranks: ranks by their number.
        torn: number of lines that are not JSON, by file.
    """

    name: str
    job: dict[str, list[Line]] = field(default_factory=dict)
    ranks: dict[int, Rank] = field(default_factory=dict)
    torn: dict[str, int] = field(default_factory=dict)

    @property
    def head(self) -> Line:
        """First line of the job; empty if it does not exist, as under torchrun."""
        return self.job.get("job", [{}])[0]

    @property
    def what(self) -> str:
        """Kind of run: "training", "simulation" or "plan"."""
        return str(self.head.get("what", "training"))


class _Growing:
    """One growing file, and the position up to which it was read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self.rest = b""  # text after the last complete line; more may come

    def gained(self) -> Iterator[bytes]:
        """Yield the complete lines that were added since the last call."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError as error:
            raise Unreadable(f"{self.path}: cannot be read: {error.strerror}") from error
        self._offset += len(data)
        *lines, self.rest = (self.rest + data).split(b"\n")
        yield from lines


class Reader:
    """Reader of the record in a folder, including lines that are added later.

    Attributes:
        run: everything read so far.

    Raises:
        UsageError: there is no record. NotBuilt: its format is newer. Unreadable: one of its files cannot be read.
    """

    def __init__(self, folder: Path, name: str | None = None) -> None:
        self.folder = folder
        self.run = Run(name or folder.resolve().name)
        self._files: dict[str, _Growing] = {}
        self.update()
        if not self._files:
            what = "no record in it" if folder.is_dir() else "no such folder"
            raise UsageError(f"{folder}: there is {what}; {_MAKE_ONE}")

    def update(self) -> bool:
        """Read new lines. Return whether there were any."""
        found = [*self.folder.glob(JOB), *sorted(self.folder.glob("rank-*.jsonl"))]
        for path in found:
            self._files.setdefault(path.name, _Growing(path))
        changed = False
        for name, file in self._files.items():
            for data in file.gained():
                changed = True
                self._take(name, data)
        return changed

    def unfinished(self) -> list[str]:
        """Return the files whose last line is incomplete."""
        return [name for name, file in self._files.items() if file.rest]

    def _take(self, name: str, data: bytes) -> None:
        if not data.strip():
            return
        try:
            line = json.loads(data)
            kind = line["kind"]
        except (ValueError, KeyError, TypeError):
            self.run.torn[name] = self.run.torn.get(name, 0) + 1
            return
        if line.get("format", 0) > FORMAT:
            raise NotBuilt(
                f"{self.folder / name}: this record has format {line['format']}, written by Sordino "
                f"{line.get('version', '?')}, but this version reads formats up to {FORMAT} only. Install that "
                "version, or a later one"
            )
        if name == JOB:
            self.run.job.setdefault(kind, []).append(line)
        else:
            self._rank_of(name, line).add(line)

    def _rank_of(self, name: str, line: Line) -> Rank:
        digits = "".join(filter(str.isdigit, name))
        number = int(line["rank"]) if line["kind"] == "rank" else int(digits or 0)
        return self.run.ranks.setdefault(number, Rank(number))


def readers(folders: list[Path], say: Callable[[str], None] = lambda _: None) -> list[Reader]:
    """Return a reader for each record. A folder that is no record stands for the records in its subfolders.

    Args:
        folders: folders that the user names.
        say: called with a line of text for each folder of records.

    Raises:
        UsageError, NotBuilt, Unreadable: see `Reader`.
    """
    found: list[Reader] = []
    for folder in folders:
        inside = sorted(path.parent for path in folder.glob(f"*/{JOB}")) if not _is_record(folder) else []
        if inside:
            say(f"{folder}: {len(inside)} records")
        found += [Reader(path) for path in inside or [folder]]
    return found


def _is_record(folder: Path) -> bool:
    return (folder / JOB).exists() or any(folder.glob("rank-*.jsonl"))
