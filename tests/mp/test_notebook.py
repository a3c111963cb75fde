"""A notebook on four ranks: its wrapping cell runs twice, and training continues after Ctrl-C (notebook_worker.py)."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import forked
from checks.commands import SORDINO
from pace import HANG_S

WORKER = Path(__file__).with_name("notebook_worker.py")
RANKS = 4


def test_cells_run_twice_and_training_goes_on_after_an_interrupt(tmp_path: Path) -> None:
    words = [*SORDINO, "run", "-np", str(RANKS), "--", *forked.python(), str(WORKER), str(tmp_path)]
    job = subprocess.run(
        words, env={"SORDINO_TIMEOUT_S": "60"} | os.environ, capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert job.returncode == 0, job.stdout + job.stderr
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS)]
    for one in told:
        outcomes = one["outcomes"]
        assert outcomes[:3] == ["start: done", "model: done", "wrap: done"]
        assert outcomes[3].startswith("wrap: UsageError") and "<cell wrap>" in outcomes[3], outcomes[3]
        assert outcomes[4:7] == ["del opt: done", "wrap: done", "train: done"]
        # Each rank gets the signal, or learns first that another rank was interrupted.
        assert outcomes[7].startswith(("train: KeyboardInterrupt", "train: PeerLost")), outcomes[7]
        assert [outcome.rpartition(": ")[2] for outcome in outcomes[8:]] == ["done"] * 6, outcomes[8:]
    assert len({one["totals"][0] for one in told}) == 1 and len(set(told[0]["totals"])) == 1
