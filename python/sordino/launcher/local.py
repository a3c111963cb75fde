"""Local job: starts the ranks of a job on this machine, without MPI, and runs them to their end.

One loop waits for all events: output of ranks, their rendezvous (rendezvous/sockets.py), their ends, and their
notices (rendezvous/notices.py). A rank's stdout comes through a pseudo-terminal, as with mpirun, so that it is written
line by line. Lines of several ranks are never mixed. The remaining ranks get signals in these cases:

| case | SIGTERM | SIGKILL |
|---|---|---|
| the time limit has passed, or `Outcomes.over()` | at once | 1 s later |
| a rank has failed, and ranks do not survive losses | after 0.3 s, for the errors of other ranks | 1 s later |
| this process has got a stop signal | the signal is passed on | after the grace (`StopSignals`) |

With `respawns`, a rank that fails while others run is replaced by a process with a new number, which joins the job. If
such a process fails within 10 s, the next replacement starts after 1 s, 2 s, 4 s, up to a minute.
"""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from sordino.awake import AwakeClock, Deadline
from sordino.launcher import descriptors, outcomes
from sordino.launcher.outcomes import Deadlines, Outcome
from sordino.launcher.processes import Ended, StopSignals, end_with_parent, subreaper
from sordino.launcher.ranks import Rank
from sordino.launcher.restarts import next_wait
from sordino.rendezvous.environment import NEWCOMER, RANK, RENDEZVOUS, SIZE, TOKEN
from sordino.rendezvous.server import RendezvousServer

_LOOK_S = 0.05
_SAY_S = 0.3  # from the first failure to SIGTERM, so that the others can print their errors
_NOTICE_S = 10.0  # in which ranks that wait for an ended rank get an error, and end by themselves
_GRACE_S = 1.0  # from SIGTERM to SIGKILL
_FILES_PER_RANK, _OTHER_FILES = 6, 64  # open files of the launcher, at most


class LocalJob:
    """Ranks of one start.

    Args:
        ranks: number of ranks.
        words: command of each rank.
        environment: environment of all ranks.
        folder: folder for the job's files.
        survives_losses: whether ranks survive losses, also without `init(on_peer_lost="continue")`.
        deadlines: deadlines of the start.
        output: file for stdout and stderr; None: those of this process.
        respawns: largest number of ranks that are replaced.
    """

    def __init__(
        self,
        ranks: int,
        words: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        survives_losses: bool,
        deadlines: Deadlines,
        output: BinaryIO | None = None,
        respawns: int = 0,
    ) -> None:
        self._limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._size, self._words, self._folder, self._survives_losses = ranks, list(words), folder, survives_losses
        self._outcomes, where = outcomes.in_folder(ranks, folder / "outcomes", True, deadlines)
        self._outcomes.patience_s = _NOTICE_S
        token = secrets.token_hex(32)
        self._environment = {
            **environment,
            "SORDINO_LAUNCHER": where,
            RENDEZVOUS: str(folder / "meet"),
            TOKEN: token,
            SIZE: str(ranks),
        }
        self._targets = (output.fileno(), output.fileno()) if output else (1, 2)
        self._events = selectors.DefaultSelector()
        self._server = RendezvousServer(folder / "meet", token.encode(), self._events, ranks)
        self._stop = StopSignals()  # replaced by the argument of `run`
        self._respawns, self._respawned = respawns, 0
        self._due: list[tuple[float, int]] = []  # times of replacements, and the ranks that they replace
        self._wait_s = 0.0  # before the next replacement
        self._started_at: dict[int, float] = {}
        self._told: set[int] = set()  # lost ranks that the server knows of
        self._living: dict[int, Rank] = {}
        self._failures: list[Outcome] = []  # in the order of observation, if a failure ends the job
        self._clock = AwakeClock()
        self._ends: list[tuple[float, int]] | None = None  # times of signals to the remaining ranks

    def run(self, stop: StopSignals, timeout: float | None = None) -> Ended:
        """Run the job to its end. No process of it remains.

        Args:
            stop: signals that are passed to the ranks.
            timeout: limit in seconds; None: no limit.
        """
        limit = None if timeout is None else Deadline(timeout)
        late, self._stop = False, stop
        with contextlib.ExitStack() as stack:
            stack.callback(self._close)
            # A rank is replaced after its files are closed. A process that joins by itself takes one of _OTHER_FILES.
            needed = _FILES_PER_RANK * self._size + _OTHER_FILES
            stack.enter_context(descriptors.allowed(needed, f"{self._size} rank{'s' * (self._size > 1)}"))
            reap = stack.enter_context(subreaper())
            stack.enter_context(stop.to(self._send))
            # If a rank cannot be started, or the job is stopped, the others are not tried.
            all(not stop.received and self._start(number) for number in range(self._size))
            while self._living:
                self._wait(_LOOK_S)
                reap([rank.process.pid for rank in self._living.values()])
                for number in self._outcomes.left_out() - self._told:
                    self._told.add(number)
                    self._server.left(number)
                self._replace_due()
                late = late or (limit is not None and limit.passed())
                self._end_if_over(late)
        stopped = stop.received[0] if stop.received else 0
        if late:
            return Ended(124)
        status, why = self._judged()
        if stopped and status != 0:
            return Ended(128 + stopped, stopped)
        if why:
            descriptors.say(why)
        return Ended(status, stopped, why=why)

    # ---- ranks

    def _start(self, number: int) -> bool:
        """Start a rank. Return whether that succeeded."""
        with self._stop.deferred():
            return self._start_now(number)

    def _start_now(self, number: int) -> bool:
        self._started_at[number] = self._clock.now()
        stdout, stdout_in = descriptors.output_pair()
        errors, errors_in = os.pipe()
        try:
            process = subprocess.Popen(
                self._words,
                env={**self._environment, RANK: str(number), **({NEWCOMER: "1"} if number >= self._size else {})},
                stdin=None if number == 0 else subprocess.DEVNULL,
                stdout=stdout_in,
                stderr=errors_in,
                preexec_fn=self._prepare_rank,
            )
        except OSError as error:
            descriptors.say(f"{self._words[0]}: {error.strerror}{self._fix()}")
            for descriptor in (stdout, errors):
                os.close(descriptor)
            self._note(number, 127)
            return False
        finally:
            os.close(stdout_in)
            os.close(errors_in)
        self._living[number] = Rank(number, process, self._events, dict(zip((stdout, errors), self._targets)))
        return True

    def _prepare_rank(self) -> None:
        """Prepare the rank's process before its program: its own process group, and SIGTERM if the launcher dies."""
        os.setpgid(0, 0)
        end_with_parent()
        resource.setrlimit(resource.RLIMIT_NOFILE, self._limits)

    def _fix(self) -> str:
        """Return the suggestion for a program that is a Python script; else ""."""
        script = self._words[0].endswith(".py") and os.path.isfile(self._words[0])
        return f"; did you mean `python {self._words[0]}`?" if script else ""

    def _collect(self, rank: Rank) -> None:
        """Note that a rank has ended. Later output of its children is lost."""
        rank.finish()
        del self._living[rank.number]
        code = rank.process.wait()
        if code != 0 and self._respawns:
            rank.send(signal.SIGKILL)  # its children, which may hold what its replacement needs, such as a port
        self._note(rank.number, code)

    def _note(self, number: int, code: int) -> None:
        self._server.left(number)
        if self._ends is not None and not self._failures:
            return  # the launcher has ended it
        outcome = Outcome(time.time(), number, code)
        self._outcomes.note(outcome.rank, outcome.code, outcome.at)
        if code != 0 and self._living and self._respawned < self._respawns and self._outcomes.have_met():
            self._respawned += 1
            now = self._clock.now()
            self._wait_s = next_wait(self._wait_s, now - self._started_at[number]) if number >= self._size else 0.0
            self._due.append((now + self._wait_s, number))
        if code != 0 and not (self._survives_losses or self._outcomes.survive_losses()):
            self._failures.append(outcome)

    def _replace_due(self) -> None:
        """Start the replacements whose time has come, unless the job is about to end."""
        if self._ends is not None or self._stop.received or not self._living:
            return
        now = self._clock.now()
        due = [lost for at, lost in self._due if at <= now]
        self._due = [(at, lost) for at, lost in self._due if at > now]
        for lost in due:
            if self._stop.received:
                break
            number = self._server.new_number()
            self._outcomes.replace(lost, number)
            text = f"{self._outcomes.known()[lost]}; process {number} replaces it"
            descriptors.say(f"{text} ({self._respawned} of {self._respawns})")
            self._start(number)

    def _send(self, number: int) -> None:
        for rank in list(self._living.values()):
            rank.send(number)

    # ---- the loop

    def _wait(self, seconds: float) -> None:
        """Wait for events, at most `seconds`, and handle them."""
        events = [key.data for key, _ in self._events.select(seconds)]
        ended = [happened for happened in events if isinstance(happened, Rank)]
        for happened in events:
            if not isinstance(happened, Rank):
                happened()
        # If two ends are seen at once, the end of a rank that a signal ended counts as the cause of the other.
        for rank in sorted(ended, key=lambda rank: rank.process.wait() >= 0):
            self._collect(rank)
        if not events:
            for rank in self._living.values():
                rank.flush()

    def _end_if_over(self, late: bool) -> None:
        """Send the signals that are due to the remaining ranks, if the job is over (see the module's table)."""
        now = self._clock.now()
        if self._ends is None and self._living:
            if late or self._outcomes.over():
                self._ends = [(now, signal.SIGTERM), (now + _GRACE_S, signal.SIGKILL)]
            elif self._failures and not self._stop.received:
                self._ends = [(now + _SAY_S, signal.SIGTERM), (now + _SAY_S + _GRACE_S, signal.SIGKILL)]
        while self._ends and now >= self._ends[0][0]:
            self._send(self._ends.pop(0)[1])

    def _judged(self) -> tuple[int, str]:
        if self._failures:
            first = self._outcomes.first_of(self._failures)
            return first.status, outcomes.because(first, len(self._failures))
        return self._outcomes.judge(0)

    def _close(self) -> None:
        for rank in self._living.values():
            rank.close()
        self._server.close()
        self._events.close()
