"""`sordino run` where something is missing or in the way: kernel features, stderr, its folder, a free terminal."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checks.commands import SORDINO, launch
from pace import HANG_S

from sordino.cli import run
from sordino.cli.app import main
from sordino.errors import NotBuilt, UsageError
from sordino.launcher import agent, mpi
from sordino.launcher.outcomes import Outcomes
from sordino.launcher.processes import StopSignals, descriptor_of_end
from sordino.record import JOB
from sordino.record.writing import job_file

OPENMPI = mpi.Launcher(Path("/opt/mpi/bin/mpirun"), "openmpi", "mpirun (Open MPI) 5.0.11")


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `main` run jobs without a child process, so that a test can replace functions."""
    monkeypatch.setattr(run, "guarded", lambda work, clear, grace: work(StopSignals()))


def _no_pidfd(*_: object) -> int:
    raise PermissionError(1, "Operation not permitted")


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("lacks", ["function", "permission"])
def test_without_descriptors_of_processes(
    lacks: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if lacks == "function":
        monkeypatch.delattr(os, "pidfd_open")
    else:
        monkeypatch.setattr(os, "pidfd_open", _no_pidfd)
    assert main(["run", "-np", "2", "--", "sh", "-c", "echo done; exit $SORDINO_RANK"]) == 1
    output = capfd.readouterr()
    assert output.out == "done\ndone\n" and "rank 1 ended with status 1" in output.err


def test_the_end_of_a_process_without_its_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        end = descriptor_of_end(child.pid)
        assert not select.select([end], [], [], 0.1)[0]
        child.kill()
        assert select.select([end], [], [], HANG_S)[0]
        assert child.wait() == -signal.SIGKILL  # its status has not been taken
    os.close(end)


def test_an_agent_without_descriptors_of_processes() -> None:
    order = {"words": ["sh", "-c", "exit 3"], "folder": "/", "environment": {}, "slots": 1}
    program = f"import os, runpy; del os.pidfd_open; runpy.run_path({agent.__file__!r}, run_name='__main__')"
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", program], stdin=subprocess.PIPE) as one:
        assert one.stdin is not None
        os.write(one.stdin.fileno(), json.dumps(order).encode() + b"\n")
        assert one.wait(HANG_S) == 3


def test_a_stderr_that_cannot_be_written(tmp_path: Path) -> None:
    """The job restarts, and has the status of its rank."""
    words = [*SORDINO, "run", "-np", "1", "--restarts", "1", "--", "sh", "-c", 'touch "$0/$SORDINO_RESTART"; exit 3']
    with open("/dev/full", "w") as full:
        done = subprocess.run([*words, str(tmp_path)], stderr=full, timeout=HANG_S)
    assert done.returncode == 3
    assert {file.name for file in tmp_path.iterdir()} == {"0", "1"}


def test_the_grace_holds_for_ranks_that_outlive_others(tmp_path: Path) -> None:
    """Rank 0 saves its work after Ctrl-C, when the other one has already ended."""
    program = (
        "import os, pathlib, sys, time\n"
        "folder, rank = pathlib.Path(sys.argv[1]), os.environ['SORDINO_RANK']\n"
        "try:\n"
        "    (folder / f'ready{rank}').touch()\n"
        "    time.sleep(100)\n"
        "except KeyboardInterrupt:\n"
        "    if rank == '0':\n"
        "        time.sleep(2)\n"
        "        (folder / 'saved').touch()\n"
        "    raise\n"
    )
    words = [*SORDINO, "run", "-np", "2", "--grace", "60", "--", sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(words, stderr=subprocess.DEVNULL, start_new_session=True) as job:
        limit = time.monotonic() + HANG_S
        while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < limit:
            time.sleep(0.01)
        job.send_signal(signal.SIGINT)
        assert job.wait(HANG_S) == 128 + signal.SIGINT
    assert (tmp_path / "saved").exists()


def test_a_folder_that_another_program_removes(tmp_path: Path) -> None:
    told = Outcomes(1, tmp_path / "gone")
    assert told.known() == {} and not told.over()
    program = 'rm -rf "$(dirname "$(dirname "$SORDINO_RENDEZVOUS")")"; sleep 0.3; exit 5'
    done = launch("run", "-np", "1", "--restarts", "1", "--", "sh", "-c", program)
    assert done.returncode == 5 and "Traceback" not in done.stderr
    assert "it has been restarted once" in done.stderr


@pytest.mark.usefixtures("in_this_process")
def test_without_a_free_terminal(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def none_left() -> tuple[int, int]:
        raise OSError("out of pty devices")

    monkeypatch.setattr(os, "openpty", none_left)
    assert main(["run", "-np", "2", "--", "echo", "done"]) == 0
    assert capfd.readouterr().out == "done\ndone\n"


def test_children_of_a_rank_that_is_replaced_end(tmp_path: Path) -> None:
    """The replacement can take what they held, such as a port."""
    program = (
        "import os, pathlib, signal, subprocess, sys, time\n"
        "import sordino.torch as hvd\n"
        "from sordino.launcher.processes import state_and_parent\n"
        "hvd.init()\n"
        "note = pathlib.Path(sys.argv[1]) / 'child'\n"
        "if os.environ['SORDINO_RANK'] == '1':\n"
        "    note.with_suffix('.new').write_text(str(subprocess.Popen(['sleep', '300']).pid))\n"
        "    note.with_suffix('.new').rename(note)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "while not note.exists():\n"
        "    time.sleep(0.01)\n"
        "limit = time.monotonic() + 10\n"
        "while state_and_parent(int(note.read_text()))[0] not in ('', 'Z') and time.monotonic() < limit:\n"
        "    time.sleep(0.01)\n"
        "os._exit(0 if time.monotonic() < limit else 9)\n"
    )
    done = launch("run", "-np", "2", "--respawn", "1", "--", sys.executable, "-c", program, str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_record_of_a_job_that_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none(*_: object) -> mpi.Launcher:
        raise NotBuilt("no working mpirun")

    monkeypatch.setattr(mpi, "find_launcher", none)
    assert main(["run", "-np", "2", "--launcher", "mpi", "--record", str(tmp_path), "--", "true"]) == 1
    assert "no working mpirun" in capsys.readouterr().err
    assert not (tmp_path / JOB).exists()


def test_a_folder_with_the_record_of_ranks(tmp_path: Path) -> None:
    (tmp_path / "rank-00000.jsonl").touch()
    with pytest.raises(UsageError, match="holds the record of another run"):
        job_file(tmp_path, "training")


def test_secrets_are_not_in_the_command_line() -> None:
    job = mpi.Job(2, ["true"], ["a", "b"], {"KEY": "secret", "OTHER": "typed"}, spreads=True)
    words = mpi.command_line(OPENMPI, job, {"KEY": "secret", "OTHER": "here"})
    assert "secret" not in " ".join(words)
    assert words[words.index("KEY") - 1] == "-x" and "OTHER=typed" in words


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(
    ("options", "variables"),
    [
        (["--hosts", "a,b"], {}),
        (["--mpi-args", "--hostfile h"], {}),
        (["--launcher", "mpi"], {"PBS_NODEFILE": "nodes"}),
        (["--launcher", "mpi"], {"SLURM_JOB_NUM_NODES": "2"}),
    ],
)
def test_hosts_of_a_file_or_a_batch_system(
    options: list[str], variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks may run elsewhere, so they get all variables, and report through mpirun."""
    started: list[mpi.Job] = []
    monkeypatch.setattr(mpi, "find_launcher", lambda *_: OPENMPI)
    monkeypatch.setattr(run.jobs, "start", lambda launcher, job, *_: started.append(job) or run.Ended(0))
    for name, text in {"SORDINO_LOG_LEVEL": "info", **variables}.items():
        monkeypatch.setenv(name, text)
    assert main(["run", "-np", "2", *options, "--", "true"]) == 0
    (job,) = started
    with run.jobs.place_for(OPENMPI, job) as place:
        assert place is None
    assert job.exports is not None and {"SORDINO_LOG_LEVEL", "SORDINO_RESTART"} <= job.exports.keys()


def test_signals_of_a_process_that_joins() -> None:
    """The program gets SIGPIPE and SIGXFSZ as from a shell."""
    words = [*SORDINO, "join", "--store", "localhost:1", "--", "grep", "SigIgn", "/proc/self/status"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=HANG_S)
    ignored = int(done.stdout.split()[1], 16)
    assert not ignored >> (signal.SIGPIPE - 1) & 1 and not ignored >> (signal.SIGXFSZ - 1) & 1
