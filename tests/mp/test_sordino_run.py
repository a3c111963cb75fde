"""`sordino run` with real ranks and without a lost rank: environment, signals, a missing program, a small /dev/shm."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import forked
import pytest
from launched import Launched, own_mounts

CONTINUE = ["--on-peer-lost", "continue"]


def test_the_variable_reaches_the_ranks(starter: str, tmp_path: Path) -> None:
    program = "import os; print('said', os.environ.get('SORDINO_ON_PEER_LOST'), os.environ['SORDINO_RESTART'])"
    for options, said in ((CONTINUE, "continue"), (["--on-peer-lost", "raise"], "raise"), ([], "None")):
        with Launched(tmp_path, ["-np", "2", *options, "--", "python", "-c", program]) as job:
            assert job.ends() == 0
            assert job.output.count(f"said {said} 0") == 2


SURVIVES = """
import os, signal, torch, sordino.torch as hvd
hvd.init(on_peer_lost="continue")
if hvd.rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
hvd.allreduce(torch.ones(1))
print("went on", hvd.size(), flush=True)
"""


def test_a_script_that_survives_losses_needs_no_option(tmp_path: Path) -> None:
    with Launched(tmp_path, ["-np", "2", "--", *forked.python(), "-c", SURVIVES]) as job:
        assert job.ends() == 0, job.output
        assert "went on 1" in job.output
        assert "sordino run: rank 1 was ended by signal 9 (SIGKILL); the others finished" in job.output


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
    for victim in ("launcher", "rank"):
        with Launched(tmp_path, ["-np", "1", *CONTINUE, "--", "python", "-c", COUNTS, str(ready)]) as job:
            job.wait_for(ready.exists)
            job.send(job.mpirun(), signal.SIGUSR1)
            job.wait_for(got.exists)
            time.sleep(0.5)  # time for a second start
            job.send(job.front.pid if victim == "launcher" else job.rank(0), signal.SIGTERM)
            assert job.ends() == (128 + signal.SIGTERM if victim == "launcher" else 1)
            assert victim == "launcher" or "rank 0 ended with status 1" in job.output
            job.leaves_nothing()
        ready.unlink()
        got.unlink()


AVERAGES = """
import torch, sordino.torch as hvd
hvd.init()
mean = hvd.allreduce(torch.full((1 << 22,), float(hvd.rank())))
assert bool((mean == 1).all())
print("right", hvd.rank(), flush=True)
"""


@pytest.mark.drill("small shared memory")
@pytest.mark.parametrize("size", ["64k", "20m"])
def test_a_small_dev_shm(by_mpirun: None, tmp_path: Path, size: str) -> None:
    before = own_mounts('mount -t tmpfs -o size=$1 tmpfs /dev/shm; shift; exec "$@"', size)
    with Launched(tmp_path, ["-np", "3", "--", *forked.python(), "-c", AVERAGES], before) as job:
        assert job.ends() == 0, job.output
        job.leaves_nothing()
        assert all(f"right {rank}\n" in job.output for rank in range(3))
        assert job.output.count("sordino run: /dev/shm has ") == 1
        free = {"64k": "64", "20m": "20,480"}[size]
        assert f"/dev/shm has {free} KiB free, but 3 ranks of Open MPI need 52,224 KiB" in job.output
