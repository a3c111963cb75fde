"""The launcher killed at any place (nothing of the job remains), and the job's status under fault tolerance."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launched import Launched
from pace import HANG_S, bound

from sordino.launcher.outcomes import Outcomes, over_stderr

WORKER = Path(__file__).with_name("launched_worker.py")
CONTINUE = ["--on-peer-lost", "continue"]
ENDS_WITHIN_S = 2.0  # after the last rank, although mpirun stays


# --- The launcher killed ----------------------------------------------------------------------------------------------


@pytest.mark.drill("the launcher killed")
@pytest.mark.parametrize("options", [[], CONTINUE], ids=["plain", "continue"])
@pytest.mark.parametrize("victim", ["front", "copy", "mpirun"])
def test_kill_9_of_the_launcher_leaves_nothing(
    starter: str, tmp_path: Path, note_time: Callable[[str, float], None], victim: str, options: list[str]
) -> None:
    if victim == "mpirun" and starter == "local":
        victim = "copy"  # nothing is above it
    with Launched(tmp_path, ["-np", "2", *options, "--", "python", str(WORKER), str(tmp_path)]) as job:
        job.wait_for(lambda: all((tmp_path / f"ready.{rank}").exists() for rank in range(2)))
        by_mpirun = 1 + 2 * bool(options)  # itself, and a supervisor above each rank
        assert len(job.processes()) == 6 + by_mpirun * (starter == "mpi")  # front, copy; ranks, their children
        assert job.files, "the job has nothing in shared memory, so nothing can be left there"
        pid = {"front": lambda: job.front.pid, "copy": job.copy, "mpirun": job.mpirun}[victim]()
        struck = time.monotonic()
        job.send(pid, signal.SIGKILL)
        assert job.ends() == (-9 if victim == "front" else 137)
        job.leaves_nothing()
        note_time("the launcher killed, until nothing is left", time.monotonic() - struck)


@pytest.mark.drill("supervisors left alone")
def test_supervisors_end_the_ranks_when_nobody_else_is_left(by_mpirun: None, tmp_path: Path) -> None:
    """As on another host, where only mpirun's daemon is above the supervisors."""
    with Launched(tmp_path, ["-np", "2", *CONTINUE, "--", "python", str(WORKER), str(tmp_path)]) as job:
        job.wait_for(lambda: all((tmp_path / f"ready.{rank}").exists() for rank in range(2)))
        above = [job.front.pid, job.copy(), job.mpirun()]
        for pid in above:
            job.send(pid, signal.SIGSTOP)  # so that none can act for the others
        for pid in above:
            job.send(pid, signal.SIGKILL)
        job.front.wait(HANG_S)
        job.leaves_no_process()


@pytest.mark.drill("mpirun that stays")
def test_mpirun_that_stays_is_ended(by_mpirun: None, tmp_path: Path, note_time: Callable[[str, float], None]) -> None:
    program = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1], str(os.getpid())).touch(); time.sleep(100)"
    ready = tmp_path / "ready"
    ready.mkdir()
    with Launched(tmp_path, ["-np", "2", *CONTINUE, "--", "python", "-c", program, str(ready)]) as job:
        job.wait_for(lambda: len(list(ready.iterdir())) == 2)
        job.send(job.mpirun(), signal.SIGSTOP)
        for file in ready.iterdir():
            job.send(int(file.name), signal.SIGKILL)
        struck = time.monotonic()
        assert job.ends() == 137
        took = time.monotonic() - struck
        note_time("all ranks killed, mpirun stopped, until the job has ended", took)
        assert took < bound(0.25, ENDS_WITHIN_S), f"{took:.2f} s"
        job.leaves_nothing()


@pytest.mark.drill("a launcher that does not stop")
@pytest.mark.parametrize("options", [[], CONTINUE], ids=["plain", "continue"])
@pytest.mark.parametrize("killed", ["", "front"])
def test_mpirun_that_does_not_stop_is_killed(by_mpirun: None, tmp_path: Path, options: list[str], killed: str) -> None:
    """mpirun has the grace period of the user, which starts with the first signal."""
    program = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1], str(os.getpid())).touch(); time.sleep(1000)"
    ready = tmp_path / "ready"
    ready.mkdir()
    words = ["-np", "2", "--grace", "0.5", *options, "--", "python", "-c", program, str(ready)]
    with Launched(tmp_path, words) as job:
        job.wait_for(lambda: len(list(ready.iterdir())) == 2)
        job.send(job.mpirun(), signal.SIGSTOP)
        job.send(job.front.pid, signal.SIGKILL if killed else signal.SIGTERM)
        assert job.ends() == (-signal.SIGKILL if killed else 128 + signal.SIGTERM)
        job.leaves_nothing()


# --- Ends of ranks and the job's status -------------------------------------------------------------------------------

# Ranks end in the order of their turns, however long each takes to start. A rank waits until its predecessors are gone,
# which is when their supervisors have seen it, and a moment longer for the supervisors to report it.
ENDS = """
import json, os, pathlib, sys, time
hows, folder = json.loads(sys.argv[1]), pathlib.Path(sys.argv[2])
rank = int(os.environ.get("SORDINO_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
code, turn = hows[rank]
(folder / f"new.{rank}").write_text(str(os.getpid()))
(folder / f"new.{rank}").rename(folder / f"pid.{rank}")
for other, (_, before) in enumerate(hows):
    while not (folder / f"pid.{other}").exists():
        time.sleep(0.01)
    while before < turn and os.path.exists("/proc/" + (folder / f"pid.{other}").read_text()):
        time.sleep(0.01)
time.sleep(0.3 if turn else 0)
os.kill(os.getpid(), -code) if code < 0 else sys.exit(code)
"""


@pytest.mark.parametrize(
    ("how", "status", "text"),
    [
        ([(0, 0), (0, 1), (0, 0)], 0, ""),
        ([(0, 1), (-9, 0), (0, 1)], 0, "rank 1 was ended by signal 9 (SIGKILL); the others finished"),
        ([(-11, 0), (-9, 1), (0, 2)], 0, "rank 0 was ended by signal 11 (SIGSEGV), rank 1 was ended by signal 9"),
        ([(-9, 1), (-9, 2), (-15, 0)], 143, "rank 2 was ended by signal 15 (SIGTERM) and was the first to fail"),
        ([(0, 0), (7, 1), (0, 0)], 7, "rank 1 ended with status 7"),
        ([(0, 1), (-9, 0), (7, 1)], 137, "rank 1 was ended by signal 9 (SIGKILL) and was the first to fail"),
    ],
)
def test_the_ranks_decide(
    starter_anywhere: str, tmp_path: Path, how: list[tuple[int, int]], status: int, text: str
) -> None:
    """`how`: the status of each rank, or -N for signal N, and its turn to end."""
    words = ["-np", "3", *CONTINUE, "--", "python", "-c", ENDS, json.dumps(how), str(tmp_path)]
    with Launched(tmp_path, words) as job:
        assert job.ends() == status, job.output
        job.leaves_nothing()
        assert text in job.output
        assert "\x1e" not in job.output
        assert ("sordino run: " in job.output) == bool(text)


def test_the_variable_reaches_the_ranks(starter: str, tmp_path: Path) -> None:
    program = "import os; print('said', os.environ.get('SORDINO_ON_PEER_LOST'), os.environ['SORDINO_RESTART'])"
    for options, said in ((CONTINUE, "continue"), (["--on-peer-lost", "raise"], "raise"), ([], "None")):
        with Launched(tmp_path, ["-np", "2", *options, "--", "python", "-c", program]) as job:
            assert job.ends() == 0
            assert job.output.count(f"said {said} 0") == 2


def test_ranks_share_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    program = "import os; print('threads', os.environ['OMP_NUM_THREADS'])"
    cores = len(os.sched_getaffinity(0))
    for ranks, options, threads in ((1, [], cores), (3, [], max(1, cores // 3)), (2, ["-x", "OMP_NUM_THREADS=5"], 5)):
        with Launched(tmp_path, ["-np", str(ranks), *options, "--", "python", "-c", program]) as job:
            assert job.ends() == 0, job.output
            assert job.output.count(f"threads {threads}\n") == ranks, job.output


def test_a_program_that_does_not_exist_is_named(starter: str, tmp_path: Path) -> None:
    with Launched(tmp_path, ["-np", "2", *CONTINUE, "--", "/no/such/program"]) as job:
        assert job.ends() == 127
        assert 1 <= job.output.count("/no/such/program: No such file or directory") <= (1 if starter == "local" else 2)
        job.leaves_nothing()


COUNTS = """
import pathlib, signal, sys, time
got = []
def note(*_):
    got.append(1)
    pathlib.Path(sys.argv[1] + ".got").touch()
signal.signal(signal.SIGUSR1, note)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(len(got)))
pathlib.Path(sys.argv[1]).touch()
while True:
    time.sleep(0.1)
"""


def test_a_rank_gets_each_signal_once(by_mpirun: None, tmp_path: Path) -> None:
    ready, got = tmp_path / "ready", tmp_path / "ready.got"
    with Launched(tmp_path, ["-np", "1", *CONTINUE, "--", "python", "-c", COUNTS, str(ready)]) as job:
        job.wait_for(ready.exists)
        job.send(job.mpirun(), signal.SIGUSR1)
        job.wait_for(got.exists)
        time.sleep(0.5)  # time for a second start
        job.send(job.front.pid, signal.SIGTERM)
        assert job.ends() == 128 + signal.SIGTERM
        job.leaves_nothing()
    ready.unlink()
    got.unlink()
    with Launched(tmp_path, ["-np", "1", *CONTINUE, "--", "python", "-c", COUNTS, str(ready)]) as job:
        job.wait_for(ready.exists)
        job.send(job.mpirun(), signal.SIGUSR1)
        job.wait_for(got.exists)
        time.sleep(0.5)  # time for a second start
        job.send(job.rank(0), signal.SIGTERM)
        assert job.ends() == 1
        assert "rank 0 ended with status 1" in job.output


@pytest.mark.parametrize(
    ("codes", "of_mpirun", "status", "text"),
    [
        ({0: 0, 1: 0}, 0, 0, ""),
        ({0: 0}, 0, 0, "the end of rank 1 is unknown; the others finished"),
        ({0: 5}, 0, 5, "rank 0 ended with status 5; see its error above"),
        ({}, 0, 1, "no rank has reported its end; mpirun's status is 0"),
        ({}, 3, 3, "no rank has reported its end; mpirun's status is 3"),
        ({0: -64, 1: -1}, 0, 192, "rank 0 was ended by signal 64 (SIGRTMAX) and was the first to fail"),
    ],
)
def test_judgement(codes: dict[int, int], of_mpirun: int, status: int, text: str) -> None:
    outcomes = Outcomes(2)
    for rank, code in codes.items():
        outcomes.note(rank, code, float(rank))
    assert outcomes.judge(of_mpirun) == (status, text)


@given(texts=st.lists(st.binary(max_size=50), min_size=3, max_size=3), cut=st.integers(1, 40))
def test_what_supervisors_say_is_taken_out_of_stderr(
    capfdbinary: pytest.CaptureFixture[bytes], texts: list[bytes], cut: int
) -> None:
    capfdbinary.readouterr()
    with over_stderr(2) as (outcomes, where, descriptor):
        token = where.removeprefix("stderr:").encode()
        lines = [b"\x1e%s 0 -9 12.5\n" % token, b"\x1e%s 1 0 13.25\r\n" % token, b""]
        stream = b"".join(text + line for text, line in zip(texts, lines))
        for begin in range(0, len(stream), cut):
            os.write(descriptor, stream[begin : begin + cut])
    assert {rank: (found.code, found.at) for rank, found in outcomes.known().items()} == {0: (-9, 12.5), 1: (0, 13.25)}
    sys.stderr.flush()
    assert capfdbinary.readouterr().err == b"".join(texts)
