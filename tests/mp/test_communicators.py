"""Communicators that are ranks, in real jobs: they end with their workers, in good and in bad."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sordino.cli import mpi

WORKER = Path(__file__).with_name("communicator_worker.py")
TIMEOUT_S = 60


@pytest.fixture
def openmpi(launcher: mpi.Launcher) -> mpi.Launcher:
    if launcher.family != "openmpi":
        pytest.skip("written for Open MPI's launcher")
    return launcher


def run(
    launcher: mpi.Launcher,
    folder: Path,
    ranks: int,
    group_size: int,
    what: str,
    victim: int = -1,
    environment: dict[str, str] | None = None,
) -> tuple[int, dict[int, dict[str, Any]], str]:
    """The job's status, how each rank of the launcher ended, and what was printed."""
    words = [sys.executable, str(WORKER), str(folder), str(group_size), what, str(victim)]
    extra = ["--with-ft", "ulfm"] if victim >= 0 else []
    done = subprocess.run(
        mpi.command_line(launcher, mpi.Job(ranks, words, extra=extra)),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**os.environ, "SORDINO_TIMEOUT_S": "10", **(environment or {})},
    )
    ended = {rank: folder / f"ended.{rank}" for rank in range(ranks)}
    told = {rank: json.loads(file.read_text()) for rank, file in ended.items() if file.exists()}
    return done.returncode, told, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("ranks", "group_size", "variable", "what"),
    [(3, 2, "", "nothing"), (6, 2, "SORDINO_RANKS_PER_NODE=3", "leave"), (6, 2, "SORDINO_SHARED_MEMORY=0", "nothing")],
)
def test_communicators_end_with_their_workers(
    openmpi: mpi.Launcher, tmp_path: Path, ranks: int, group_size: int, variable: str, what: str
) -> None:
    name, _, value = variable.partition("=")
    status, told, output = run(openmpi, tmp_path, ranks, group_size, what, environment={name: value} if name else {})
    assert status == 0, output
    workers = {place: one for place, one in told.items() if one["worker"]}
    communicators = {place: one for place, one in told.items() if not one["worker"]}
    assert sorted(communicators) == list(range(group_size, ranks, group_size + 1))
    assert all(one == {"worker": False, "status": 0} for one in communicators.values())
    assert [one["rank"] for _, one in sorted(workers.items())] == list(range(len(workers)))
    assert {one["size"] for one in workers.values()} == {len(workers)}
    # The gradient is 4 times the mean of 1, 2, ...; also the last of 20 steps counts.
    wanted = -0.01 * 20 * 4 * (len(workers) + 1) / 2
    for one in workers.values():
        assert one["weights"] == pytest.approx([wanted] * 2, rel=1e-5)


@pytest.mark.parametrize(("what", "cause"), [("kill", "its process has ended"), ("raise", "boom of the victim")])
def test_communicators_fail_with_a_worker_that_dies(
    openmpi: mpi.Launcher, tmp_path: Path, what: str, cause: str
) -> None:
    _, told, output = run(openmpi, tmp_path, 3, 2, what, victim=1)
    for survivor in (0, 2):
        assert told[survivor]["kind"] == "PeerLost", output
        assert "rank 1 " in told[survivor]["text"] and cause in told[survivor]["text"]
    assert told[2]["worker"] is False and "status" not in told[2]
    assert "PeerLost" in output


def test_workers_fail_with_a_communicator_that_dies(openmpi: mpi.Launcher, tmp_path: Path) -> None:
    _, told, output = run(openmpi, tmp_path, 3, 2, "kill communicator", victim=2)
    for worker in (0, 1):
        assert told[worker]["kind"] == "PeerLost", output
        assert "rank 2 " in told[worker]["text"]
