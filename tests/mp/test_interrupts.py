"""Signals that arrive while a rank waits for others: Ctrl-C ends the call at once, on every transport."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import forked
import pytest
from checks.commands import SORDINO
from pace import HANG_S, bound, stretched

from sordino._core import build_info

WORKER = Path(__file__).with_name("interrupt_worker.py")
REPEATED = ("again", "large", "barrier", "first", "allgather")  # calls that can be repeated in mode "continue"
RAISED = ("crossover", "synchronize", "allreduce")  # steps with an algorithm, and an asynchronous operation
RANKS = 3
LATEST_S = 0.2
TRANSPORTS = {
    "local": {},
    "ucx": {"SORDINO_TRANSPORT": "ucx", "SORDINO_RANKS_PER_NODE": "1"},
    "nodes": {"SORDINO_TRANSPORT": "ucx", "SORDINO_RANKS_PER_NODE": "2"},
    "mpi": {},
}


def run(words: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=HANG_S)


@pytest.mark.drill("interrupted by Ctrl-C")
@pytest.mark.parametrize("mode", ["raise", "continue"])
@pytest.mark.parametrize("way", TRANSPORTS)
def test_an_interrupt_ends_a_wait(
    request: pytest.FixtureRequest, tmp_path: Path, note_time: Callable[[str, float], None], way: str, mode: str
) -> None:
    if way == "mpi":
        request.getfixturevalue("launcher")
    elif way != "local" and not build_info()["ucx"]:
        pytest.skip("this build has no UCX")
    launcher = "mpi" if way == "mpi" else "local"
    environment = {"SORDINO_TIMEOUT_S": "60", **os.environ, **TRANSPORTS[way], "SORDINO_ON_PEER_LOST": mode}
    words = [*SORDINO, "run", "--launcher", launcher, "-np", str(RANKS), "--", *forked.python(), str(WORKER)]
    calls = REPEATED + RAISED * (mode == "raise")
    if way != "local":  # each init() takes a while
        calls = REPEATED[:2] + RAISED[:1] * (mode == "raise")
    job = run([*words, str(tmp_path), *calls], environment)
    reports = [tmp_path / f"{rank}.json" for rank in range(RANKS)]
    assert all(report.exists() for report in reports), job.stdout + job.stderr
    seen = [json.loads(report.read_text()) for report in reports]
    for name in calls:
        note_time("Ctrl-C, until a call that waits has ended", seen[0][f"{name} took"])
        assert seen[0][f"{name} took"] < bound(LATEST_S)
        if mode == "continue":  # the ranks meet again, and the call can be repeated
            assert seen[0][name] == "KeyboardInterrupt, then done"
            assert [one[name] for one in seen[1:]] == ["done"] * (RANKS - 1)
            continue
        first, _, second = seen[0][name].partition(", then ")
        assert first == "KeyboardInterrupt"
        assert "rank 0 was interrupted by a signal while it waited for" in second
        for one in seen[1:]:
            assert one[name].startswith("PeerLost: rank 0 has failed: rank 0 was interrupted"), one[name]
    assert [one["sum"] for one in seen] == [6.0] * RANKS
    assert seen[0]["handled"] == 1


def test_an_interrupt_ends_a_meeting_at_a_store(tmp_path: Path, free_port: int) -> None:
    """Ranks that torchrun starts meet at a store of torch, whose own wait would delay signals."""
    program = """
import os, signal, threading
import sordino.torch as hvd
try:
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    hvd.init()
except KeyboardInterrupt:
    print("interrupted", flush=True)
    os._exit(0)
"""
    environment = {
        **os.environ, "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port),
    }  # fmt: skip
    job = run([*forked.python(), "-c", program], environment)
    assert job.stdout == "interrupted\n", job.stderr


def test_an_interrupt_ends_a_training_and_its_job(tmp_path: Path) -> None:
    """Ctrl-C at the terminal reaches all ranks and the launcher."""
    program = "import sordino.torch as hvd, torch, pathlib, sys\nhvd.init()\n"
    program += "pathlib.Path(sys.argv[1], str(hvd.rank())).touch()\nwhile True:\n    hvd.allreduce(torch.ones(4))\n"
    words = [*SORDINO, "run", "-np", "2", "--", *forked.python(), "-c", program, str(tmp_path)]
    job = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        limit = time.monotonic() + HANG_S
        while len(list(tmp_path.iterdir())) < 2:
            assert job.poll() is None and time.monotonic() < limit
            time.sleep(0.01)
        os.killpg(job.pid, signal.SIGINT)
        _, errors = job.communicate(timeout=HANG_S)
        assert job.returncode == 128 + signal.SIGINT, errors
    finally:
        if job.poll() is None:
            job.kill()


# Rank 0 waits in a repeated small all-reduce, as the other rank is stopped. Its signal handler calls another one.
NESTED = """
import os, signal, sys, threading, time, torch
import sordino.torch as hvd
torch.set_num_threads(1)
hvd.init()
rank = hvd.rank()
x, y = torch.ones(4), torch.ones(4)
process = int(hvd.allgather(torch.tensor([os.getpid()]))[1])
for _ in range(20):
    hvd.allreduce_(x, name="x", op=hvd.Sum), hvd.allreduce_(y, name="y", op=hvd.Sum)
hvd.barrier()
x.fill_(10 * (rank + 1)), y.fill_(100 * (rank + 1))
handled = []

def handle(*_):
    handled.append(hvd.allreduce_(y, name="y", op=hvd.Sum)[0].item())

signal.signal(signal.SIGALRM, handle)
if rank == 0:
    while open(f"/proc/{process}/stat").read().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.001)
    threading.Timer(0.6, os.kill, (process, signal.SIGCONT)).start()
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    hvd.allreduce_(x, name="x", op=hvd.Sum)
else:
    os.kill(os.getpid(), signal.SIGSTOP)
    handle()
    hvd.allreduce_(x, name="x", op=hvd.Sum)
assert handled == [300.0] and x[0] == 30, (handled, x)
hvd.shutdown()
"""


def test_a_handler_may_communicate_while_its_thread_waits() -> None:
    words = [*SORDINO, "run", "-np", "2", "--", *forked.python(), "-c", NESTED]
    job = run(words, {**os.environ, "SORDINO_TIMEOUT_S": "60"})
    assert job.returncode == 0, job.stderr


# While rank 0 waits for rank 1, it handles a signal for longer than the permitted silence.
LONG = """
import signal, sys, time, torch
import sordino.torch as hvd
torch.set_num_threads(1)
hvd.init(on_peer_lost="continue")
silence = float(sys.argv[1])
hvd.barrier()
if hvd.rank() == 0:
    signal.signal(signal.SIGALRM, lambda *_: time.sleep(2.5 * silence))
    signal.setitimer(signal.ITIMER_REAL, 0.1)
elif hvd.rank() == 1:
    time.sleep(3 * silence)
assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size() == 3
hvd.shutdown()
"""


def test_a_rank_that_handles_a_signal_for_long_is_not_silent() -> None:
    silence = stretched(1)
    words = [*SORDINO, "run", "-np", "3", "--", *forked.python(), "-c", LONG, str(silence)]
    job = run(words, {**os.environ, "SORDINO_SILENCE_S": str(silence)})
    assert job.returncode == 0, job.stderr
