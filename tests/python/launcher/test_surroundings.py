"""`sordino run` in odd surroundings: closed and non-blocking output, few open files, long paths, other locales."""

from __future__ import annotations

import fcntl
import os
import resource
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest
from checks.commands import SORDINO, launch
from pace import HANG_S

from sordino.cli import run
from sordino.cli.app import main
from sordino.errors import UsageError
from sordino.launcher import jobs, mpi
from sordino.launcher.processes import Ended, StopSignals

LINES = 20_000


def said(script: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a shell script, whose arguments are these words."""
    return subprocess.run(
        ["/bin/bash", "-c", script, "bash", *words], capture_output=True, text=True, timeout=HANG_S
    )  # fmt: skip


def unread(descriptor: int) -> int:
    """Return the bytes in a pipe."""
    return int.from_bytes(fcntl.ioctl(descriptor, termios.FIONREAD, b"\0" * 4), sys.byteorder)


def test_no_output_is_lost_in_a_pipe_that_does_not_block() -> None:
    """A program that makes its stdout non-blocking does so for all processes that share it."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    program = f"for i in range({LINES}): print(i, '.' * 50)"
    with subprocess.Popen([*SORDINO, "run", "-np", "1", "--", sys.executable, "-c", program], stdout=writing) as job:
        os.close(writing)
        while unread(reading) < 1 << 15 and job.poll() is None:
            time.sleep(0.01)
        time.sleep(0.2)  # until the pipe is full
        with open(reading) as lines:
            found = [int(line.split()[0]) for line in lines]
        assert job.wait(HANG_S) == 0
    assert found == list(range(LINES))


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_streams_that_the_caller_has_closed(tmp_path: Path, closed: str) -> None:
    words = [*SORDINO, "run", "-np", "2", "--", "sh", "-c", f'touch {tmp_path}/"$SORDINO_RANK"; echo done']
    done = said(f'"$@" {closed}; echo status $?', *words)
    assert "status 0\n" in done.stdout and done.stderr == ""
    assert len(list(tmp_path.iterdir())) == 2
    assert (done.stdout.count("done") == 2) == (">&-" not in closed.split())


def test_more_ranks_than_the_soft_limit_of_open_files_allows() -> None:
    """The ranks keep the limit that the user has set."""
    done = said('ulimit -Sn 24; exec "$@"', *SORDINO, "run", "-np", "8", "--", "sh", "-c", "ulimit -Sn")
    assert (done.returncode, done.stdout.split()) == (0, ["24"] * 8), done.stderr


def test_replacements_need_no_files_of_their_own() -> None:
    done = said('ulimit -n 100; exec "$@"', *SORDINO, "run", "-np", "1", "--respawn", "100000", "--", "true")
    assert done.returncode == 0, done.stderr


def test_more_ranks_than_the_hard_limit_allows() -> None:
    done = said('ulimit -n 40; exec "$@"', *SORDINO, "run", "-np", "8", "--", "true")
    assert done.returncode == 2
    assert done.stderr.startswith("sordino run: 8 ranks need 112 open files, but the limit is 40. Start fewer")


def test_the_limit_is_restored(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (60, before[1]))
    try:
        with jobs.job_folder() as place, StopSignals() as stop, open(tmp_path / "out", "wb") as output:
            job = mpi.Job(2, ["true"])
            assert jobs.start_locally(job, dict(os.environ), place, False, stop, output=output).status == 0
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (60, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_path_that_is_too_long_for_a_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setattr(jobs.os, "access", lambda *_: False)  # /dev/shm cannot be written
    monkeypatch.setattr(jobs.tempfile, "gettempdir", lambda: str(folder))
    too_long = pytest.raises(UsageError, match="AF_UNIX path too long; set TMPDIR to a shorter path")
    with too_long, jobs.job_folder() as place:
        jobs.start_locally(mpi.Job(1, ["true"]), {}, place, False, StopSignals())
    assert not list(folder.iterdir())


def test_a_locale_without_a_character_of_a_path(tmp_path: Path) -> None:
    done = said('PYTHONIOENCODING=ascii exec "$@"', *SORDINO, "examples", "minimal", f"{tmp_path}/\xb5")
    assert done.returncode == 0 and f"{tmp_path}/\\xb5/minimal.py\n" == done.stdout, done.stderr


@pytest.mark.parametrize("words", [["sh", "-c", 'echo "$0" "$@"'], ["--", "sh", "-c", 'echo "$0" "$@"']])
def test_a_separator_of_the_program_reaches_it(words: list[str]) -> None:
    assert launch("run", "-np", "1", *words, "--", "a", "--", "b").stdout == "-- a -- b\n"


def test_variables_for_the_ranks_hold_for_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """If only the ranks know that they survive losses, the launcher ends them when one is lost."""
    started: list[Any] = []

    def start_locally(job: mpi.Job, variables: Any, place: Any, survives_losses: bool, *_: Any, **__: Any) -> Ended:
        started.append((variables.get("SORDINO_ON_PEER_LOST"), survives_losses))
        return Ended(0)

    monkeypatch.setattr(run, "guarded", lambda work, clear, grace: work(StopSignals()))
    monkeypatch.setattr(jobs, "start_locally", start_locally)
    for options in (["-x", "SORDINO_ON_PEER_LOST=continue"], ["--on-peer-lost", "continue"], ["--respawn", "1"]):
        assert main(["run", "-np", "2", *options, "--", "true"]) == 0
    assert started == [("continue", True)] * 3


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (["--on-peer-lost", "continue", "-x", "SORDINO_ON_PEER_LOST=raise"], "SORDINO_ON_PEER_LOST=raise"),
        (["--respawn", "1", "-x", "SORDINO_ON_PEER_LOST=raise"], "SORDINO_ON_PEER_LOST=raise"),
        (["--record", "here", "-x", "SORDINO_RECORD=there"], "SORDINO_RECORD=there"),
    ],
)
def test_an_option_and_a_variable_that_contradict(
    options: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "-np", "2", *options, "--", "true"]) == 2
    assert f"sordino run: -x {name} contradicts" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["SORDINO_RANK", "SORDINO_RESTART", "SORDINO_TOKEN"])
def test_variables_of_the_launcher_are_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-np", "2", "-x", f"{name}=1", "--", "true"]) == 2
    assert f"sordino run: -x {name}: the launcher sets this variable" in capsys.readouterr().err
