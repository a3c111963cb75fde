"""`sordino run` in a terminal: input for rank 0, Ctrl-Z, a closed terminal, and signals for the program."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from checks.commands import SORDINO
from pace import HANG_S

from sordino.launcher.processes import state_and_parent


class Terminal:
    """A program in a terminal of its own, which is killed at the end of the block."""

    def __init__(self, words: Sequence[str], before: Callable[[], None] = lambda: None) -> None:
        self.shown = b""
        self.pid, self._side = pty.fork()
        if self.pid == 0:
            before()
            os.execv(words[0], list(words))

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._side)

    def type(self, text: str) -> None:
        os.write(self._side, text.encode())

    def read(self, seconds: float) -> bool:
        """Read the output that the program shows within `seconds`. Return False at its end."""
        if not select.select([self._side], [], [], seconds)[0]:
            return True
        try:
            data = os.read(self._side, 1 << 16)
        except OSError:
            data = b""
        self.shown += data
        return bool(data)

    def wait_for(self, text: str) -> re.Match[bytes]:
        limit = time.monotonic() + HANG_S
        while (found := re.search(text.encode(), self.shown)) is None:
            assert self.read(0.1) and time.monotonic() < limit, self.shown
        return found

    def ends(self) -> int:
        limit = time.monotonic() + HANG_S
        while self.read(0.1):
            assert time.monotonic() < limit, self.shown
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


ASKS = "import os; print('it is', input('name? ') if os.environ['SORDINO_RANK'] == '0' else 'rank 1')"
READS = "import sys; print('read', repr(sys.stdin.read()))"


def test_rank_0_reads_from_the_terminal() -> None:
    """Its process is in the background, where the kernel stops a process that reads from the terminal."""
    with Terminal([*SORDINO, "run", "-np", "2", "--", sys.executable, "-c", ASKS]) as shell:
        shell.wait_for("name[?]")
        shell.type("Bob\n")
        assert shell.ends() == 0
        assert b"it is Bob" in shell.shown and b"it is rank 1" in shell.shown


def test_the_end_of_input_reaches_rank_0() -> None:
    with Terminal([*SORDINO, "run", "-np", "1", "--", sys.executable, "-c", READS]) as shell:
        shell.type("one\ntwo\n\x04")
        assert shell.ends() == 0
        assert b"read 'one\\ntwo\\n'" in shell.shown


NOTES = """
import os, signal, subprocess, sys, time
child = subprocess.Popen(["sleep", "300"])  # such as a worker of a DataLoader, which the signals would end
got = []
for number in (signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda number, _: got.append(number))
print("pid", os.getpid(), os.getppid(), "", flush=True)
while len(got) < 2:
    time.sleep(0.05)
print("got", sorted(got), "child", child.poll(), flush=True)
child.kill()
"""


def states(pids: Sequence[int]) -> str:
    return "".join(state_and_parent(pid)[0] for pid in pids)


def test_ctrl_z_stops_all_processes_until_the_job_is_continued() -> None:
    words = [*SORDINO, "run", "-np", "1", "--", sys.executable, "-c", NOTES]
    with Terminal(["/bin/bash", "-c", 'set -m; "$@"; read; kill -CONT %1; wait; echo over', "bash", *words]) as shell:
        rank, copy = map(int, shell.wait_for(r"pid (\d+) (\d+) ").groups())
        pids = [state_and_parent(copy)[1], copy, rank]
        shell.type("\x1a")
        limit = time.monotonic() + HANG_S
        while states(pids) != "TTT":
            assert shell.read(0.05) and time.monotonic() < limit, states(pids)
        shell.type("\n")
        while "T" in states(pids):
            assert shell.read(0.05) and time.monotonic() < limit, states(pids)
        for number in (signal.SIGUSR1, signal.SIGUSR2):  # which do not end a job
            os.kill(pids[0], number)
        shell.wait_for(r"got \[.*\] child None")
        shell.wait_for("over")


@pytest.mark.parametrize("ignored", [True, False])
def test_nohup(tmp_path: Path, ignored: bool) -> None:
    """A closed terminal ends a job, but not one that was started by `nohup`."""
    done = tmp_path / "done"
    program = f"import time; print('runs', flush=True); time.sleep(1); open({str(done)!r}, 'w')"

    def before() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)

    with Terminal([*SORDINO, "run", "-np", "1", "--", sys.executable, "-c", program], before) as shell:
        shell.wait_for("runs")
        os.kill(shell.pid, signal.SIGHUP)
        assert shell.ends() == (0 if ignored else 128 + signal.SIGHUP)
        assert done.exists() == ignored
