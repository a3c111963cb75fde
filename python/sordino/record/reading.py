"""Takes up a record, also while it grows: what a file has gained since the last look, whole lines only.

A line that a kill has torn is left out, and that is said. So is a rank that ended without a word: it was killed, or the
run still goes on.
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
    """What one rank, or virtual worker, has written, in the order in which it was written.

    Attributes:
        rank: its number in the first world.
        lines: by their kind.
        last: the kind of the last line.
    """

    rank: int
    lines: dict[str, list[Line]] = field(default_factory=dict)
    last: str = ""

    def of(self, kind: str) -> list[Line]:
        """Return the lines of a kind."""
        return self.lines.get(kind, [])

    def add(self, line: Line) -> None:
        """Take up a line, and which start of the job it is of."""
        started = self.of("rank")
        line.setdefault("start", started[-1].get("start", 0) if started else 0)
        self.last = line["kind"]
        self.lines.setdefault(self.last, []).append(line)


@dataclass
class Run:
    """A record.

    Attributes:
        name: of its folder.
        job: lines of the job, by their kind: "job" (the first), "start", "end", "result".
        ranks: by their number.
        torn: lines that are no JSON, by file.
    """

    name: str
    job: dict[str, list[Line]] = field(default_factory=dict)
    ranks: dict[int, Rank] = field(default_factory=dict)
    torn: dict[str, int] = field(default_factory=dict)

    @property
    def head(self) -> Line:
        """The first line of the job; empty where nobody has written one, as under torchrun."""
        return self.job.get("job", [{}])[0]

    @property
    def what(self) -> str:
        """Of what it is: "training", "simulation" or "plan"."""
        return str(self.head.get("what", "training"))


class _Growing:
    """One file, from where it was left."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self.rest = b""  # after the last whole line: more may come

    def gained(self) -> Iterator[bytes]:
        """Yield the whole lines that have come since the last time."""
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
    """Reads the record in a folder, and again what has been added to it.

    Attributes:
        run: what has been read so far.

    Raises:
        UsageError: there is no record. NotBuilt: it is of a newer format. Unreadable: a file of it cannot be read.
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
        """Take up what is new; return whether anything is."""
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
        """Return the files whose last line is not whole."""
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
                f"{self.folder / name}: this record is of format {line['format']}, written by Sordino "
                f"{line.get('version', '?')}; this one reads up to {FORMAT}: install that version, or a later one"
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
    """Return a reader for each record, and for each in a folder that has none itself but folders that do.

    Args:
        folders: what the user names.
        say: is told of what is found beside.

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
