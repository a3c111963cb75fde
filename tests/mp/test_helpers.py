"""Ranks without a model in real jobs: they end with their workers, with or without a fault."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import forked
import pytest
from pace import HANG_S

from sordino.launcher import mpi

WORKER = Path(__file__).with_name("helper_worker.py")


@pytest.fixture
def openmpi(launcher: mpi.Launcher) -> mpi.Launcher:
    if launcher.family != "openmpi":
        pytest.skip("written for Open MPI's launcher")
    return launcher


def run(
    launcher: mpi.Launcher,
    folder: Path,
    ranks: int,
    helpers: str,
    what: str,
    victim: int = -1,
    environment: dict[str, str] | None = None,
) -> tuple[int, dict[int, dict[str, Any]], str]:
    """Return the job's status, how each rank of the launcher ended, and the output."""
    words = [*forked.python(), str(WORKER), str(folder), helpers, what, str(victim)]
    extra = ["--with-ft", "ulfm"] if victim >= 0 else []
    done = subprocess.run(
        mpi.command_line(launcher, mpi.Job(ranks, words, extra=extra)),
        capture_output=True,
        text=True,
        timeout=HANG_S,
        env={**os.environ, "SORDINO_TIMEOUT_S": "60", **(environment or {})},
    )
    ended = {rank: folder / f"ended.{rank}" for rank in range(ranks)}
    told = {rank: json.loads(file.read_text()) for rank, file in ended.items() if file.exists()}
    return done.returncode, told, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("ranks", "helpers", "places", "variable", "what"),
    [
        pytest.param(*one, marks=pytest.mark.drill(f"they end: {one[1].split()[1]}"))
        for one in (
            (3, "groups of 2", [2], "", "nothing"),
            (6, "groups of 2", [2, 5], "SORDINO_RANKS_PER_NODE=3", "leave"),
            (6, "groups of 2", [2, 5], "SORDINO_SHARED_MEMORY=0", "nothing"),
            (3, "1 servers", [2], "", "leave"),
            (5, "2 servers", [3, 4], "SORDINO_RANKS_PER_NODE=2", "nothing"),
            (4, "2 servers", [2, 3], "SORDINO_SHARED_MEMORY=0", "leave"),
        )
    ],
)
def test_helpers_end_with_their_workers(
    openmpi: mpi.Launcher, tmp_path: Path, ranks: int, helpers: str, places: list[int], variable: str, what: str
) -> None:
    name, _, value = variable.partition("=")
    status, told, output = run(openmpi, tmp_path, ranks, helpers, what, environment={name: value} if name else {})
    assert status == 0, output
    workers = {place: one for place, one in told.items() if one["worker"]}
    served = {place: one for place, one in told.items() if not one["worker"]}
    assert sorted(served) == places
    assert all(one == {"worker": False, "status": 0} for one in served.values())
    assert [one["rank"] for _, one in sorted(workers.items())] == list(range(len(workers)))
    assert {one["size"] for one in workers.values()} == {len(workers)}
    # The gradient is 4 times the mean of 1, 2, ...; the last of the 20 steps also counts.
    wanted = -0.01 * 20 * 4 * (len(workers) + 1) / 2
    for one in workers.values():
        assert one["weights"] == pytest.approx([wanted] * 2, rel=1e-5)


HELPERS = ("groups of 2", "1 servers")


@pytest.mark.drill("a worker with a helper is lost")
@pytest.mark.parametrize("helpers", HELPERS)
@pytest.mark.parametrize(("what", "cause"), [("kill", "its process has ended"), ("raise", "boom of the victim")])
def test_helpers_fail_with_a_worker_that_dies(
    openmpi: mpi.Launcher, tmp_path: Path, helpers: str, what: str, cause: str
) -> None:
    _, told, output = run(openmpi, tmp_path, 3, helpers, what, victim=1)
    for survivor in (0, 2):
        assert told[survivor]["kind"] == "PeerLost", output
        assert "rank 1 " in told[survivor]["text"] and cause in told[survivor]["text"]
    assert told[2]["worker"] is False and "status" not in told[2]
    assert "PeerLost" in output


@pytest.mark.drill("a helper is lost")
@pytest.mark.parametrize("helpers", HELPERS)
def test_workers_fail_with_a_helper_that_dies(openmpi: mpi.Launcher, tmp_path: Path, helpers: str) -> None:
    _, told, output = run(openmpi, tmp_path, 3, helpers, "kill helper", victim=2)
    for worker in (0, 1):
        assert told[worker]["kind"] == "PeerLost", output
        assert "rank 2 " in told[worker]["text"]
