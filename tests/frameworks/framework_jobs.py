"""Jobs of two ranks that use a framework."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checks.commands import SORDINO
from pace import HANG_S

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
SORDINO_RUN = [*SORDINO, "run", "-np", "2", "--", sys.executable]
MPIRUN = [*SORDINO, "run", "--launcher", "mpi", "-np", "2", "--", sys.executable]
LAUNCHERS = {"torchrun": TORCHRUN, "sordino run": SORDINO_RUN, "mpirun": MPIRUN}


def need(*frameworks: str) -> None:
    """Skip the test if one of the frameworks is not installed."""
    for name in frameworks:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed; `make test-frameworks` installs it")


def run(launcher: str, folder: Path, program: Path, *words: str) -> str:
    return run_command([*LAUNCHERS[launcher], str(program), *words], folder)


def run_command(command: list[str], folder: Path) -> str:
    environment = os.environ | {"SORDINO_TIMEOUT_S": "60", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def loss_of(output: str) -> float:
    """Return the loss that an example has printed, once."""
    [found] = re.findall(r"(?:^| )loss (\d\S*)$", output, re.MULTILINE)
    return float(found)


def results_of(output: str) -> dict[str, Any]:
    """Return the results that a worker has printed on rank 0, after both ranks have printed that all is well."""
    assert output.count("well") == 2, output
    [found] = re.findall(r"^results (.*)$", output, re.MULTILINE)
    return dict(json.loads(found))
