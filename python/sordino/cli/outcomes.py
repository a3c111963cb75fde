"""What is known of the ranks of a job, and what that makes of it: when it is over, and with which status.

A rank tells that it waits for the others to start, that it has met them, whom it goes on without, that an error of its
own ends it, and that it exits (launch/telling.py). Under fault tolerance a keeper tells how it ended, for mpirun's own
status is 0 there even if every rank was killed.
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
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sordino.awake import AwakeClock
from sordino.cli.processes import state_and_parent

_KEEPER = Path(__file__).with_name("keeper.py")
_LONGEST_LINE = 100
_START = "start"
_GONE, _STOPPED = ("", "Z"), "T"  # states of processes
_PATIENCE_S = 0.5
_LOOK_S = 0.5
_LEFT_OUT_S = 10.0  # for a rank that was left out to wake up, and to end by itself


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


@dataclass(frozen=True)
class Deadlines:
    """In seconds, from when the first rank waits for others to start.

    Attributes:
        start: until the job is ended; so long, too, after the others' end it waits for ranks that stand still.
        warning: until it is said who is missing.
    """

    start: float = 1800.0
    warning: float = 60.0


@dataclass(frozen=True)
class _Hopeless:
    """Why it seems that nothing can come of the ranks that have not ended.

    Attributes:
        cause: stays the same while the ranks that it is about change.
        text: what there is to say.
        patience_s: after so many seconds it is certain.
        status: of the job then; if None, the ranks' ends decide.
        ends: ranks to be killed then, rather than the job.
    """

    cause: str
    text: str
    patience_s: float
    status: int | None = None
    ends: Collection[int] = ()


class Outcomes:
    """What is known of the ranks of a job.

    Args:
        ranks: how many there are.
        folder: to which they and their keepers tell; without it, whoever hears them calls `note` and `hear`.
        kept: keepers tell how they end.
        deadlines: for the start.
    """

    def __init__(
        self, ranks: int, folder: Path | None = None, kept: bool = True, deadlines: Deadlines | None = None
    ) -> None:
        self.ranks = ranks
        self.kept = kept
        self.patience_s = _PATIENCE_S  # with those that wait for one that has ended
        self._folder = folder
        self._deadlines = deadlines or Deadlines()
        self._known: dict[int, Outcome] = {}
        self._told: dict[str, set[int]] = defaultdict(set)
        self._failures: list[int] = []  # ranks that have left in an error of their own, in this order
        self._read: set[str] = set()  # links of the folder, none of which changes
        self._pids: dict[int, int] = {}  # of ranks of this machine that have told anything
        self._states: dict[int, str] = {}
        self._looked = 0.0
        self._clock = AwakeClock()  # `over` is asked every few hundredths of a second
        self._since = ("", 0.0)  # what seems hopeless, and from when
        self._warned = False
        self._verdict: _Hopeless | None = None

    def note(self, rank: int, code: int, at: float) -> None:
        """Note what a keeper has told."""
        self._known[rank] = Outcome(at, rank, code)

    def hear(self, rank: int, word: str, pid: int = 0) -> None:
        """Hear that a rank `waits` for the others to start, has `met` them, `fails` or `exits`, or was `left` behind.

        A rank tells all of these of itself but the last, which another rank tells.

        Args:
            rank: which has told, or which the others have left behind.
            word: "waits", "met", "fails", "exits" or "left".
            pid: whose process has told, if it is one of this machine.
        """
        if word == "fails":
            self._failures.append(rank)
        self._told[word].add(rank)
        if pid and word != "left":
            self._pids[rank] = pid

    def known(self) -> dict[int, Outcome]:
        """Return the outcomes by rank. Of ranks that end with the job, as it is over, nothing more is heard."""
        new = [one for one in self._folder.iterdir() if one.name not in self._read] if self._folder else []
        for link in sorted(new, key=lambda one: one.lstat().st_mtime_ns) if not self._verdict else ():
            self._read.add(link.name)
            word, _, rank = link.name.rpartition(".")
            told = os.readlink(link).split()
            if word:
                self.hear(int(rank), word, int(told[0]))
            else:
                code, at = told
                self.note(int(rank), int(code), float(at))
        return self._known

    def over(self) -> bool:
        """Return whether there is nothing to wait for.

        All ranks have ended, or nothing can come of those that have not.
        """
        if self._verdict:
            return True
        now = self._clock.now()
        hopeless = self._hopeless()
        if hopeless is None:
            self._since = ("", 0.0)
            return self.complete()
        if self._since[0] != hopeless.cause:
            self._since = (hopeless.cause, now)
        waited = now - self._since[1]
        if hopeless.cause == _START and waited > self._deadlines.warning and not self._warned:
            self._warned = True
            print(f"sordino run: stalled: {hopeless.text}, for {waited:.0f} s", file=sys.stderr, flush=True)
        if waited > hopeless.patience_s:
            if hopeless.ends:
                self._end(hopeless)
            else:
                self._verdict = hopeless
        return self._verdict is not None

    def _end(self, hopeless: _Hopeless) -> None:
        """Kill ranks of this machine for whose end the others wait, who then end by themselves, each in its way."""
        print(f"sordino run: {hopeless.text}; killed", file=sys.stderr, flush=True)
        for rank in hopeless.ends:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[rank], signal.SIGKILL)
        self._since = ("", 0.0)

    def _hopeless(self) -> _Hopeless | None:
        """Return why there may be nothing to wait for, though some ranks have not ended."""
        known, told = self.known(), self._told
        states = self._look()
        left = {rank for rank in range(self.ranks) if rank not in known and states.get(rank) not in _GONE}
        waiting = told["waits"] - told["met"] - known.keys()
        missed = min((outcome for rank, outcome in known.items() if rank not in told["met"]), default=None)
        if missed and waiting:
            # One that has started MPI by other means has met the others without a word, which are about to say so.
            text = f"{missed} before it had met the others, who cannot start without it"
            return _Hopeless("missed", text, self.patience_s, missed.status or 1)
        if waiting:
            absent = left - told["waits"] - told["met"]
            text = f"in init() {_names(waiting)} {'wait' if len(waiting) > 1 else 'waits'}"
            text += f" for {_names(absent)} to come" if absent else ", and the ranks do not meet"
            return _Hopeless(_START, text, self._deadlines.start, 1)
        if left and left <= told["left"]:
            text = f"{_names(left)} had been left out by the others, and did not end"
            return _Hopeless("left out", text, _LEFT_OUT_S)
        # In MPI_Finalize the others wait for those that stand still.
        still = {rank for rank in left if states.get(rank) == _STOPPED}
        if still and len(still) < self.ranks and left <= still | told["exits"]:
            text = f"{_names(still)} stood still (SIGSTOP) when all others had come to their end"
            return _Hopeless("stopped", text, self._deadlines.start, ends=still)
        return None

    def _look(self) -> dict[int, str]:
        """Return the states of the processes that are known, at most so old that hundreds of ranks cost nothing."""
        now = time.monotonic()
        if now - self._looked > _LOOK_S:
            self._looked = now
            self._states = {rank: state_and_parent(pid)[0] for rank, pid in self._pids.items()}
        return self._states

    def complete(self) -> bool:
        """Return whether all ranks have ended."""
        return len(self.known()) == self.ranks

    def first_of(self, failed: Sequence[Outcome]) -> Outcome:
        """Return the outcome of the rank that failed first.

        The others fail because of it, and some of them may end before it does. A rank that was on its way out is ended
        together with the others; it has failed all the same, with status 1.

        Args:
            failed: outcomes of ranks that failed, in the order of their ends.
        """
        self.known()
        # A rank that has left in an error may have handled it, and ended well.
        ended = {outcome.rank: outcome for outcome in failed}
        blamed = next((ended[rank] for rank in self._failures if rank in ended), None)
        if blamed is None:
            return failed[0]
        return blamed if blamed.code > 0 else replace(blamed, code=1)

    def judge(self, launcher: int) -> tuple[int, str]:
        """Return the status of the job, and what there is to say about it ("" if nothing).

        A rank that a signal ended is lost, and so is one that nobody has told of. The job went well if some rank
        finished with status 0 and so did all that were not lost; else it has the status of the rank that failed first.
        One without which the others could not start has made it fail.

        Args:
            launcher: mpirun's status, for a job of which no rank has told that it failed.
        """
        verdict = self._verdict
        if verdict and verdict.status is not None:
            late = f", for more than {self._deadlines.start:g} s (SORDINO_TIMEOUT_S)" if verdict.cause == _START else ""
            return verdict.status, verdict.text + late
        if not self.kept:
            return launcher, ""
        known = self.known()
        failed = sorted(outcome for outcome in known.values() if outcome.code != 0)
        if len(failed) < len(known) and all(outcome.code < 0 for outcome in failed):
            lost = [str(outcome) for outcome in failed]
            if verdict:
                lost.append(verdict.text)
            else:
                lost += [f"how rank {rank} ended is not known" for rank in range(self.ranks) if rank not in known]
            return 0, f"{', '.join(lost)}; the others finished" if lost else ""
        if failed:
            first = self.first_of(failed)
            return first.status, because(first, len(failed))
        return launcher or 1, f"no rank has told how it ended; mpirun's status is {launcher}"


def because(first: Outcome, failed: int) -> str:
    """Return the line about the first of several ranks that failed. Its own error line tells the cause."""
    text = f"{first}" + (", the first that failed" if failed > 1 else "")
    return f"{text}; why stands above" if first.code > 0 else text


def keeper(where: str) -> list[str]:
    """Return the words before the command of each rank; `where` as `in_folder` and `over_stderr` give it."""
    return [sys.executable, "-I", "-S", str(_KEEPER), where]


def _names(ranks: Collection[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"


def in_folder(ranks: int, folder: Path, kept: bool = True, deadlines: Deadlines | None = None) -> tuple[Outcomes, str]:
    """Return the outcomes of ranks of this machine, and where they and their keepers tell."""
    folder.mkdir()
    return Outcomes(ranks, folder, kept, deadlines), str(folder)


@contextlib.contextmanager
def over_stderr(ranks: int, deadlines: Deadlines | None = None) -> Iterator[tuple[Outcomes, str, int]]:
    """Yield the outcomes of ranks on any machine, where they and their keepers tell, and a descriptor.

    The descriptor is for mpirun's stderr. What comes there goes on to our own stderr, without such lines.
    """
    outcomes, token = Outcomes(ranks, deadlines=deadlines), secrets.token_hex(8)
    reading, writing = os.pipe()
    thread = threading.Thread(target=_pass_on, args=(reading, token, outcomes), daemon=True)
    thread.start()
    try:
        yield outcomes, f"stderr:{token}", writing
    finally:
        os.close(writing)
        thread.join(5)  # a process that has inherited the pipe and outlives the job does not hold us


def _pass_on(reading: int, token: str, outcomes: Outcomes) -> None:
    line = re.compile(rf"\x1e{token} (\d+) (-?\d+|waits|met|left|fails|exits) ([\d.]+)\r?\n".encode())
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
    """Return the signal's name, as in `signal 9 (SIGKILL)`."""
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"
