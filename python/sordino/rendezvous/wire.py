"""Messages to `sordino run` about a rank: how they are written and read. Uses the standard library only.

`SORDINO_LAUNCHER` is a folder on this machine, where every message is a link (made atomically, even on a full disk), or
`stderr:TOKEN`. With the latter, a message is a line on stderr, which the launcher removes.

| message | link | line on stderr |
|---|---|---|
| a notice of the rank | WORD.RANK -> PID | 0x1e TOKEN RANK WORD PID |
| the rank has ended | RANK -> CODE TIME | 0x1e TOKEN RANK CODE TIME |
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

BEGIN = b"\x1e"
"""First byte of a line."""
LONGEST = 100
"""Upper limit for the bytes of a line."""
ENDED = "ended"
_NOTICES = "waits|survives|met|left|fails|exits|departs"


class Message(NamedTuple):
    """A message about a rank.

    Attributes:
        rank: number of the rank at the launcher.
        word: the notice (notices.py), or `ENDED`.
        pid: process that sends a notice; 0: it may be on another machine.
        code: of `ENDED`: the exit status, or -N for signal N.
        at: of `ENDED`: the time, in seconds since the epoch.
    """

    rank: int
    word: str
    pid: int = 0
    code: int = 0
    at: float = 0.0


def send(where: str, message: Message) -> None:
    """Send a message; `where` is the value of SORDINO_LAUNCHER. Raises OSError if it cannot be sent."""
    rank, word, pid, code, at = message
    ended = word == ENDED
    scheme, _, token = where.partition(":")
    if scheme == "stderr":
        text = f"{code} {at}" if ended else f"{word} {pid}"
        os.write(2, BEGIN + f"{token} {rank} {text}\n".encode())
    else:
        os.symlink(f"{code} {at}" if ended else str(pid), f"{where}/{rank}" if ended else f"{where}/{word}.{rank}")


def read_link(link: Path) -> Message:
    """Return the message of a link in the folder."""
    word, _, rank = link.name.rpartition(".")
    values = os.readlink(link).split()
    if word:
        return Message(int(rank), word, pid=int(values[0]))
    return Message(int(rank), ENDED, code=int(values[0]), at=float(values[1]))


def lines(token: str) -> re.Pattern[bytes]:
    """Return the pattern of lines with this token."""
    return re.compile(BEGIN + rf"{token} (\d+) (-?\d+|{_NOTICES}) ([\d.]+)\r?\n".encode())


def read_line(found: re.Match[bytes]) -> Message:
    """Return the message of a line that `lines` has found. The process of a notice may be on another machine."""
    rank, what, value = int(found[1]), found[2].decode(), float(found[3])
    return Message(rank, what) if what.isalpha() else Message(rank, ENDED, code=int(what), at=value)
