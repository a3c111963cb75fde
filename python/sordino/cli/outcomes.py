"""How each rank of a job under fault tolerance ended, as its keeper tells, and what that makes of the job.

mpirun's own status is 0 there even if every rank was killed.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_KEEPER = Path(__file__).with_name("keeper.py")
_LONGEST_LINE = 100
_PATIENCE_S = 0.5


@dataclass(frozen=True, order=True)
class Outcome:
    """How one rank ended: when (seconds since the epoch), which, and its exit status, or -N for signal N."""

    at: float
    rank: int
    code: int

    @property
    def status(self) -> int:
        """As a shell has it."""
        return self.code if self.code >= 0 else 128 - self.code

    def __str__(self) -> str:
        if self.code < 0:
            return f"rank {self.rank} was ended by {signal_name(-self.code)}"
        return f"rank {self.rank} ended with status {self.code}"


class Outcomes:
    """What is known of the ends of the ranks of a job: in a folder that keepers write to, else from `note`."""

    def __init__(self, ranks: int, folder: Path | None = None) -> None:
        self.ranks = ranks
        self._folder = folder
        self._known: dict[int, Outcome] = {}
        self._told: dict[str, set[int]] = {"waits": set(), "met": set()}
        self._missed_since: float | None = None
        self._missed: Outcome | None = None  # for good

    def note(self, rank: int, code: int, at: float) -> None:
        """A keeper has told."""
        self._known[rank] = Outcome(at, rank, code)

    def hear(self, rank: int, word: str) -> None:
        """The rank itself has told that it `waits` for the others to start, or has `met` them."""
        self._told[word].add(rank)

    def known(self) -> dict[int, Outcome]:
        """The outcomes by rank."""
        for link in self._folder.iterdir() if self._folder else ():
            word, _, rank = link.name.rpartition(".")
            if word:
                self.hear(int(rank), word)
            else:
                code, at = os.readlink(link).split()
                self.note(int(rank), int(code), float(at))
        return self._known

    def over(self) -> bool:
        """Whether all ranks have ended, or some wait for one to start that has ended, as they would for ever."""
        known, met = self.known(), self._told["met"]
        missed = min((outcome for rank, outcome in known.items() if rank not in met), default=None)
        if missed is None or self._told["waits"] <= met | known.keys():
            self._missed_since = None
            return self.complete()
        # One that started MPI by other means has met the others without a word, which are just about to say so.
        self._missed_since = self._missed_since or time.monotonic()
        if time.monotonic() - self._missed_since > _PATIENCE_S:
            self._missed = missed
        return self._missed is not None

    def complete(self) -> bool:
        """Whether all ranks have ended."""
        return len(self.known()) == self.ranks

    def judge(self, launcher: int) -> tuple[int, str]:
        """The status of the job, and what there is to say about it ("" if nothing).

        A rank that a signal ended is lost, and so is one that nobody has told of. The job went well if some rank
        finished with status 0 and so did all that were not lost; else it has the status of the rank that failed first.
        One without which the others could not start has made it fail.

        Args:
            launcher: mpirun's status, for a job of which no rank has told that it failed.
        """
        if self._missed is not None:
            return self._missed.status or 1, f"{self._missed} before it had met the others, who cannot start without it"
        known = self.known()
        failed = sorted(outcome for outcome in known.values() if outcome.code != 0)
        lost = [str(outcome) for outcome in failed if outcome.code < 0]
        lost += [f"how rank {rank} ended is not known" for rank in range(self.ranks) if rank not in known]
        if len(lost) == len(failed) + self.ranks - len(known) < self.ranks:
            return 0, f"{', '.join(lost)}; the others finished" if lost else ""
        if failed:
            return failed[0].status, f"{failed[0]}" + (", the first that failed" if len(failed) > 1 else "")
        return launcher or 1, f"no rank has told how it ended; mpirun's status is {launcher}"


def keeper(where: str) -> list[str]:
    """The words before the command of each rank; `where` as `in_folder` and `over_stderr` give it."""
    return [sys.executable, "-I", "-S", str(_KEEPER), where]


def in_folder(ranks: int, folder: Path) -> tuple[Outcomes, str]:
    """The outcomes of ranks of this machine, and where their keepers write them."""
    folder.mkdir()
    return Outcomes(ranks, folder), str(folder)


@contextlib.contextmanager
def over_stderr(ranks: int) -> Iterator[tuple[Outcomes, str, int]]:
    """The outcomes of ranks on any machine, where their keepers write them, and the descriptor for mpirun's stderr.

    What comes there goes on to our own stderr, without the keepers' lines.
    """
    outcomes, token = Outcomes(ranks), secrets.token_hex(8)
    reading, writing = os.pipe()
    thread = threading.Thread(target=_pass_on, args=(reading, token, outcomes), daemon=True)
    thread.start()
    try:
        yield outcomes, f"stderr:{token}", writing
    finally:
        os.close(writing)
        thread.join(5)  # a process that has inherited the pipe and outlives the job does not hold us


def _pass_on(reading: int, token: str, outcomes: Outcomes) -> None:
    line = re.compile(rf"\x1e{token} (\d+) (-?\d+|waits|met) ([\d.]+)\r?\n".encode())
    held, data = b"", b"-"
    while data:
        data = os.read(reading, 65536)
        held += data
        for found in line.finditer(held):
            if found[2].isalpha():
                outcomes.hear(int(found[1]), found[2].decode())
            else:
                outcomes.note(int(found[1]), int(found[2]), float(found[3]))
        held = line.sub(b"", held)
        # The rest of a line that has begun may still come.
        begun = held.rfind(b"\x1e")
        if not data or begun < 0 or len(held) - begun > _LONGEST_LINE:
            begun = len(held)
        sys.stderr.buffer.write(held[:begun])
        sys.stderr.buffer.flush()
        held = held[begun:]
    os.close(reading)


def signal_name(number: int) -> str:
    """As in `signal 9 (SIGKILL)`."""
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"
