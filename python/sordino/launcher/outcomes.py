"""Outcomes of the ranks of a job. They determine when the job is over, and its status.

The sources are notices of ranks (waits, survives, met, left, fails, exits; rendezvous/notices.py) and reports of their
ends. With mpirun's fault tolerance, reports come from a supervisor, because mpirun's status is 0 even if every rank was
killed. The job is over if all ranks have ended, or if one of these conditions (`_hopeless`) has held for a time:

| cause | condition | time | then |
|---|---|---|---|
| missed | ranks wait in init(), another ended before it met them | 0.5 s, LocalJob: 10 s | ends with its status or 1 |
| start | ranks wait in init() | SORDINO_TIMEOUT_S | ends with status 1 |
| left out | the others continue without all ranks that run | 10 s | ends; the ranks' ends give the status |
| stopped | all ranks that run are stopped (SIGSTOP) or exit | SORDINO_TIMEOUT_S | stopped ranks are killed |
"""

from __future__ import annotations

import contextlib
import os
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
from sordino.launcher import descriptors
from sordino.launcher.processes import state_and_parent
from sordino.rendezvous import wire

_SUPERVISOR = Path(__file__).with_name("supervisor.py")
_START = "start"
_GONE, _STOPPED = ("", "Z"), "T"  # states of processes
_PATIENCE_S = 0.5
_LOOK_S = 0.5
_LEFT_OUT_S = 10.0  # in which a lost rank that still runs notices that it is lost, and ends by itself


@dataclass(frozen=True, order=True)
class Outcome:
    """End of one rank: its time (seconds since the epoch), the rank, and its exit status or -N for signal N."""

    at: float
    rank: int
    code: int

    @property
    def status(self) -> int:
        """Exit status as in a shell: 128 + N for signal N."""
        return self.code if self.code >= 0 else 128 - self.code

    def __str__(self) -> str:
        if self.code < 0:
            return f"rank {self.rank} was ended by {signal_name(-self.code)}"
        return f"rank {self.rank} ended with status {self.code}"


@dataclass(frozen=True)
class Deadlines:
    """Deadlines in seconds, from the time when the first rank waits for others to start.

    Attributes:
        start: until the job is ended. Also the time to wait for stopped ranks after the end of the others.
        warning: until a warning about missing ranks.
    """

    start: float = 1800.0
    warning: float = 60.0


@dataclass(frozen=True)
class _Hopeless:
    """Condition under which the job is not expected to finish by itself (see the module's table).

    Attributes:
        cause: name of the condition. The ranks concerned may change while it holds.
        text: message for the user.
        patience_s: seconds after which the condition takes effect.
        status: status of the job then; None: it follows from the ranks' ends.
        ends: ranks to be killed then, instead of the job.
    """

    cause: str
    text: str
    patience_s: float
    status: int | None = None
    ends: Collection[int] = ()


class Outcomes:
    """Notices and outcomes of the ranks of a job.

    Args:
        ranks: number of ranks.
        folder: folder for links of ranks and supervisors; None: the caller passes their messages to `hear` and `note`.
        kept: whether the ends of ranks are reported (by supervisors, or by the caller).
        deadlines: deadlines of the start.
    """

    def __init__(
        self, ranks: int, folder: Path | None = None, kept: bool = True, deadlines: Deadlines | None = None
    ) -> None:
        self._ranks = set(range(ranks))
        self.kept = kept
        self.patience_s = _PATIENCE_S  # for ranks that wait for a rank that has ended
        self._folder = folder
        self._deadlines = deadlines or Deadlines()
        self._known: dict[int, Outcome] = {}
        self._notices: dict[str, set[int]] = defaultdict(set)
        self._failures: list[int] = []  # ranks that left because of their own error, in this order
        self._replaced: dict[int, int] = {}  # ranks that have ended, and the processes that replace them
        self._read: set[str] = set()  # links of the folder; a link never changes
        self._pids: dict[int, int] = {}  # of ranks on this machine that have sent a notice
        self._states: dict[int, str] = {}
        self._looked = 0.0
        self._clock = AwakeClock()  # `over` is called every few hundredths of a second
        self._since = ("", 0.0)  # cause of the current condition, and its begin
        self._warned = False
        self._verdict: _Hopeless | None = None

    def note(self, rank: int, code: int, at: float) -> None:
        """Record the end of a rank: its status or -signal, and the time in seconds since the epoch."""
        self._known = {**self._known, rank: Outcome(at, rank, code)}  # a new dict: other threads iterate over the old

    def replace(self, lost: int, number: int) -> None:
        """Note that process `number` replaces a rank that has ended, which no longer counts as failed."""
        self._ranks.add(number)
        self._replaced[lost] = number

    def left_out(self) -> set[int]:
        """Return the ranks without which the others have continued. Some may still run."""
        self.known()
        return set(self._notices["left"])

    def have_met(self) -> bool:
        """Return whether ranks have met, so that another process can join them."""
        self.known()
        return bool(self._notices["met"])

    def survive_losses(self) -> bool:
        """Return whether a rank has said that the ranks survive losses (`init(on_peer_lost="continue")`)."""
        self.known()
        return bool(self._notices["survives"])

    def take(self, message: wire.Message) -> None:
        """Record a message: the end of a rank, or its notice."""
        if message.word == wire.ENDED:
            self.note(message.rank, message.code, message.at)
        else:
            self.hear(message.rank, message.word, message.pid)

    def hear(self, rank: int, word: str, pid: int = 0) -> None:
        """Record a notice of a rank (rendezvous/notices.py).

        Args:
            rank: the sender; for "left" the lost rank.
            word: "waits", "survives", "met", "fails", "exits", "departs" or "left".
            pid: process of the sender if it is on this machine, else 0.
        """
        if word == "fails":
            self._failures.append(rank)
        self._notices[word].add(rank)
        if pid and word != "left":
            self._pids[rank] = pid

    def known(self) -> dict[int, Outcome]:
        """Return the outcomes by rank. Messages of ranks that end because the job is over are ignored."""
        for link in self._new_links() if not self._verdict else ():
            self._read.add(link.name)
            self.take(wire.read_link(link))
        return self._known

    def _new_links(self) -> list[Path]:
        """Return the links of the folder that have not been read, in the order in which they were made.

        If another program has removed the folder, there are no more notices, and the job goes on without.
        """
        if self._folder is None:
            return []
        try:
            new = [one for one in self._folder.iterdir() if one.name not in self._read]
            return sorted(new, key=lambda one: one.lstat().st_mtime_ns)
        except OSError:
            return []

    def over(self) -> bool:
        """Return whether the job is over: all ranks have ended, or a condition of the module's table has taken effect.

        Prints the warning about missing ranks, and kills stopped ranks, when these are due.
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
            descriptors.say(f"stalled: {hopeless.text}, for {waited:.0f} s")
        if waited > hopeless.patience_s:
            if hopeless.ends:
                self._end(hopeless)
            else:
                self._verdict = hopeless
        return self._verdict is not None

    def _end(self, hopeless: _Hopeless) -> None:
        """Kill stopped ranks of this machine. The others, which wait for their ends, end by themselves then."""
        descriptors.say(f"{hopeless.text}; killed")
        for rank in hopeless.ends:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[rank], signal.SIGKILL)
        self._since = ("", 0.0)

    def _hopeless(self) -> _Hopeless | None:
        """Return the condition of the module's table that holds now; None if none holds."""
        known, notices = self.known(), self._notices
        states = self._look()
        left = {rank for rank in sorted(self._ranks) if rank not in known and states.get(rank) not in _GONE}
        waiting = notices["waits"] - notices["met"] - known.keys()
        missed = min((outcome for rank, outcome in known.items() if rank not in notices["met"]), default=None)
        if missed and waiting:
            # The patience is for a rank that started MPI by other means. It has met the others without a notice, and
            # they are about to send theirs.
            text = f"{missed} before all ranks had met, and the others cannot start without it"
            return _Hopeless("missed", text, self.patience_s, missed.status or 1)
        if waiting:
            absent = left - notices["waits"] - notices["met"]
            text = f"in init() {_names(waiting)} {'wait' if len(waiting) > 1 else 'waits'}"
            text += f" for {_names(absent)}" if absent else ", and the ranks do not meet"
            return _Hopeless(_START, text, self._deadlines.start, 1)
        if left and left <= notices["left"]:
            them = "them" if len(left) > 1 else "it"
            text = f"{_names(left)} did not end, although the others had continued without {them}"
            return _Hopeless("left out", text, _LEFT_OUT_S)
        # The others wait in MPI_Finalize for stopped ranks.
        still = {rank for rank in left if states.get(rank) == _STOPPED}
        if still and len(still) < len(self._ranks) and left <= still | notices["exits"]:
            text = f"{_names(still)} {'were' if len(still) > 1 else 'was'} stopped (SIGSTOP) when all others had ended"
            return _Hopeless("stopped", text, self._deadlines.start, ends=still)
        return None

    def _look(self) -> dict[int, str]:
        """Return the states of known processes. Reads them at most every 0.5 s, to be cheap for hundreds of ranks."""
        now = time.monotonic()
        if now - self._looked > _LOOK_S:
            self._looked = now
            self._states = {rank: state_and_parent(pid)[0] for rank, pid in self._pids.items()}
        return self._states

    def complete(self) -> bool:
        """Return whether all ranks have ended."""
        return len(self.known()) == len(self._ranks)

    def first_of(self, failed: Sequence[Outcome]) -> Outcome:
        """Return the outcome of the rank that failed first.

        The others fail because of it, and some of them may end before it. If it was ended together with the others
        while it was exiting, it counts as failed with status 1.

        Args:
            failed: outcomes of ranks that failed, in the order of their ends.
        """
        self.known()
        # A rank that left because of an error may have handled it, and ended with status 0.
        ended = {outcome.rank: outcome for outcome in failed}
        blamed = next((ended[rank] for rank in self._failures if rank in ended), None)
        if blamed is None:
            return failed[0]
        return blamed if blamed.code > 0 else replace(blamed, code=1)

    def judge(self, launcher: int) -> tuple[int, str]:
        """Return the status of the job and a message, which may be "".

        A rank is lost if a signal ended it, or if its end is unknown. The job succeeds if some rank finished with
        status 0 (a rank that left before the end has not finished), and no rank failed except lost and replaced ones.
        Else it has the status of the rank that failed first. A condition with its own status (see the module's table)
        takes precedence.

        Args:
            launcher: mpirun's status, which is used if no end of a rank is known.
        """
        verdict = self._verdict
        if verdict and verdict.status is not None:
            late = f", for more than {self._deadlines.start:g} s (SORDINO_TIMEOUT_S)" if verdict.cause == _START else ""
            return verdict.status, verdict.text + late
        if not self.kept:
            return launcher, ""
        known = self.known()
        never_joined = {rank for rank in self._replaced.values() if rank not in self._notices["met"]}
        failed = sorted(one for one in known.values() if one.code != 0 and one.rank not in never_joined)
        finished = any(one.code == 0 and one.rank not in self._notices["departs"] for one in known.values())
        if finished and all(one.code < 0 or one.rank in self._replaced for one in failed):
            by = {rank: f" and was replaced by process {number}" for rank, number in self._replaced.items()}
            lost = [f"{one}{by.get(one.rank, '')}" for one in failed]
            if verdict:
                lost.append(verdict.text)
            else:
                lost += [f"the end of rank {rank} is unknown" for rank in sorted(self._ranks) if rank not in known]
            return 0, f"{', '.join(lost)}; the others finished" if lost else ""
        if failed:
            failed = [one for one in failed if one.rank not in self._replaced] or failed
            first = self.first_of(failed)
            return first.status, because(first, len(failed))
        if known:
            return 1, "no rank has finished: all have left before the end"
        return launcher or 1, f"no rank has reported its end; mpirun's status is {launcher}"


def because(first: Outcome, failed: int) -> str:
    """Return the message about the first rank that failed. The cause is in its own error output."""
    text = f"{first}" + (" and was the first to fail" if failed > 1 else "")
    return f"{text}; see its error above" if first.code > 0 else text


def supervisor(where: str) -> list[str]:
    """Return the words before the command of each rank; `where` as returned by `in_folder` or `over_stderr`."""
    return [sys.executable, "-I", "-S", str(_SUPERVISOR), where]


def _names(ranks: Collection[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"


def in_folder(ranks: int, folder: Path, kept: bool = True, deadlines: Deadlines | None = None) -> tuple[Outcomes, str]:
    """Return the outcomes of ranks on this machine, and the value of SORDINO_LAUNCHER for them."""
    folder.mkdir()
    return Outcomes(ranks, folder, kept, deadlines), str(folder)


@contextlib.contextmanager
def over_stderr(ranks: int, deadlines: Deadlines | None = None) -> Iterator[tuple[Outcomes, str, int]]:
    """Yield the outcomes of ranks on any machine, the value of SORDINO_LAUNCHER, and a descriptor for mpirun's stderr.

    Data written to the descriptor go to this process's stderr, without the lines for the launcher.
    """
    outcomes, token = Outcomes(ranks, deadlines=deadlines), secrets.token_hex(8)
    reading, writing = os.pipe()
    thread = threading.Thread(target=_pass_on, args=(reading, token, outcomes), daemon=True)
    thread.start()
    try:
        yield outcomes, f"stderr:{token}", writing
    finally:
        os.close(writing)
        thread.join(5)  # limited: a process that stays after the job may hold the pipe open


def _pass_on(reading: int, token: str, outcomes: Outcomes) -> None:
    line = wire.lines(token)
    held, data = b"", b"-"
    while data:
        data = os.read(reading, 65536)
        held += data
        for found in line.finditer(held):
            outcomes.take(wire.read_line(found))
        held = line.sub(b"", held)
        # The rest of an incomplete line may still come.
        begun = held.rfind(wire.BEGIN)
        if not data or begun < 0 or len(held) - begun > wire.LONGEST:
            begun = len(held)
        descriptors.write(2, held[:begun])  # not through sys.stderr, whose errors would end this thread
        held = held[begun:]
    os.close(reading)


def signal_of(status: int) -> int:
    """Return the signal that an exit status means in a shell; 0 for none, as for 255, which ssh and mpirun return."""
    return status - 128 if 128 < status <= 128 + signal.SIGRTMAX else 0


def signal_name(number: int) -> str:
    """Return a signal's description, such as `signal 9 (SIGKILL)`."""
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"
