"""A script for DDP gives the same losses if only the lines that wrap the model are changed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import forked
import pytest
from checks.commands import SORDINO
from pace import HANG_S

WORKER = Path(__file__).with_name("ddp_twin.py")
LAUNCHERS = {
    "ddp": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"],
    "sordino": [*SORDINO, "run", "-np", "2", "--"],
}


@pytest.mark.soak  # test_training_programs.py does this with random programs
@pytest.mark.usefixtures("launcher")
def test_the_losses_are_those_of_ddp(tmp_path: Path) -> None:
    told = {}
    for how, launcher in LAUNCHERS.items():
        out = tmp_path / how
        command = [*launcher, *forked.python(), str(WORKER), how, str(out)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
        assert done.returncode == 0, done.stderr
        told[how] = json.loads(out.read_text())
    losses, norms = zip(*told["ddp"])
    assert losses[-1] < 0.9 * losses[0], "it learns"
    assert min(norms) < 1 < max(norms), "some steps are clipped"
    for mine, theirs in zip(told["sordino"], told["ddp"], strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)
