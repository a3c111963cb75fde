"""Client of the ranks on this machine: finds them, and asks all of them at the same time."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sordino.errors import NotBuilt
from sordino.inspection.address import PREFIX, address_of, uid_of_peer

_ANSWERS_WITHIN_S = 0.8  # more than a rank needs, unless it runs code that holds the GIL
_STATES = {"T": "stopped", "t": "stopped by a debugger", "D": "waiting for a disk", "Z": "ended", "R": "running"}


def processes(unix: Path = Path("/proc/net/unix")) -> list[tuple[int, int]]:
    """Return user id and process id of the processes on this machine that answer.

    Raises:
        NotBuilt: the system does not list its sockets.
    """
    try:
        lines = unix.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise NotBuilt(f"sordino inspect finds ranks in {unix}, which cannot be read here: {error.strerror}") from error
    found = set()
    for line in lines:
        name = line.rpartition(" ")[2]
        parts = name.removeprefix("@").split("/")
        if name.startswith("@") and parts[0] == PREFIX and len(parts) == 3 and all(map(str.isdecimal, parts[1:])):
            found.add((int(parts[1]), int(parts[2])))
    return sorted(found)


def ask_all(pids: list[int] | None = None) -> list[dict[str, Any]]:
    """Ask the processes of this user (as root: of all users), or only those with these ids.

    Returns:
        the answers of processes that are ranks (see `sordino.inspection.state`). For a process that does not answer:
        pid, and `silent` with what /proc says of it.
    """
    mine = os.getuid()
    asked = [(uid, pid) for uid, pid in processes() if mine in (uid, 0) and (pids is None or pid in pids)]
    with ThreadPoolExecutor(max(1, len(asked))) as pool:
        answers = list(pool.map(_ask, asked))
    return [answer for answer in answers if answer is not None and answer.get("worlds", True)]


def _ask(who: tuple[int, int]) -> dict[str, Any] | None:
    uid, pid = who
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_ANSWERS_WITHIN_S)
            connection.connect("\0" + address_of(uid, pid))
            if uid_of_peer(connection) != uid:  # another user has taken the name
                return None
            return dict(json.loads(b"".join(_parts(connection))))
    except ConnectionRefusedError:
        return None  # it has just ended
    except (OSError, ValueError):
        return {"pid": pid, "silent": _from_outside(pid)}


def _parts(connection: socket.socket) -> Iterator[bytes]:
    while part := connection.recv(1 << 16):
        yield part


def _from_outside(pid: int) -> str:
    """Describe a process that does not answer."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "has ended"
    if letter in "Tt":
        return f"is {_STATES[letter]}: `kill -CONT {pid}` lets it go on"
    doing = _STATES.get(letter, "asleep")
    return f"does not answer ({doing}): it runs code that holds the GIL; `py-spy dump --pid {pid}` shows which"
