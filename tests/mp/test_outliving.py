"""Asynchronous gossip when a rank is killed: the others continue, log the lost rank, and finish."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import forked
import pytest
from pace import HANG_S

from sordino.launcher import mpi

DEADLINE_S = 60
WORKER = Path(__file__).with_name("outliving_worker.py")
RANKS = 4
# Ranks of the same node learn of the end from the kernel, other ranks from MPI.
CASES = [
    ("none", 1, 0),
    ("naive", 3, 2),
    ("autonomous", 2, 1),
    ("manager", 0, 0),
    ("manager", 0, 1),
    ("adpsgd", 0, 1),
]


@pytest.mark.drill("killed: asynchronous gossip")
@pytest.mark.parametrize(("algorithm", "victim", "ranks_per_node"), CASES)
def test_the_others_train_on(
    launcher: mpi.Launcher, tmp_path: Path, algorithm: str, victim: int, ranks_per_node: int
) -> None:
    if launcher.family != "openmpi":
        pytest.skip("other launchers end the job when a rank is killed")
    command = [*forked.python(), str(WORKER), str(tmp_path), algorithm, str(victim)]
    done = subprocess.run(
        mpi.command_line(launcher, mpi.Job(RANKS, command, extra=["--with-ft", "ulfm"])),
        env=os.environ | {"SORDINO_RANKS_PER_NODE": str(ranks_per_node), "SORDINO_TIMEOUT_S": str(DEADLINE_S)},
        capture_output=True,
        text=True,
        timeout=2 * HANG_S,
    )
    survivors = [rank for rank in range(RANKS) if rank != victim]
    missing = [rank for rank in survivors if not (tmp_path / f"report.{rank}").exists()]
    told = "".join(path.read_text()[-1000:] for path in sorted(tmp_path.glob("said.*")))
    assert not missing, f"ranks {missing} did not come to the end\n{done.stderr[-3000:]}{told}"
    assert not (tmp_path / f"report.{victim}").exists()
    for rank in survivors:
        report = json.loads((tmp_path / f"report.{rank}").read_text())
        assert report["finite"] and report["losses"][1] < report["losses"][0], report
        assert report["taken_later"] > 5, report
        assert report["longest_step"] < DEADLINE_S, report  # no rank waited for the lost one
        # The operation needs the victim, or a rank that has left because of it: whichever loss is noticed first.
        assert re.search(r"rank \d, which (is lost|has shut down)", report["collective"]), report
        said = (tmp_path / f"said.{rank}").read_text()
        assert f"rank {victim} on" in said and f"Rank {rank} continues without it" in said
        if algorithm == "manager" and victim == 0:
            assert f"rank 0, which schedules the pulls, is gone: rank {rank} now schedules" in said
