"""Objects that a rank makes and drops leave no memory, descriptors or mappings behind, also none of peers' memory."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from checks.commands import SORDINO
from flat_worker import SLACK
from pace import HANG_S

WORKER = Path(__file__).with_name("flat_worker.py")


def flat(folder: Path, operations: int, objects: int) -> None:
    words = [*SORDINO, "run", "-np", "2", "--", "python", str(WORKER), str(folder / "told"), operations, objects]
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=4 * HANG_S)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        for phase, (first, last) in json.loads((folder / f"told.{rank}").read_text()).items():
            for what, slack in SLACK.items():
                assert last[what] <= first[what] + slack, f"{phase} of rank {rank}: {what}"


@pytest.mark.usefixtures("launcher")
def test_what_is_dropped_is_gone(tmp_path: Path) -> None:
    flat(tmp_path, 4_000, 45)


@pytest.mark.soak
@pytest.mark.usefixtures("launcher")
def test_thousands_are_dropped(tmp_path: Path) -> None:
    flat(tmp_path, 100_000, 500)
