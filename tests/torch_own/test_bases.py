"""The base classes of torch's own tests serve the backend "sordino" (own_bases.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pace import HANG_S

BASES = Path(__file__).parent / "own_bases.py"


@pytest.mark.soak
@pytest.mark.parametrize("base", ["TestContinuous", "TestDTensor", "TestFSDP"])
def test_base(base: str) -> None:
    done = subprocess.run(
        [sys.executable, str(BASES), base, "-v"], env={"SORDINO_TIMEOUT_S": "60", "OMP_NUM_THREADS": "1"} | os.environ,
        capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "skipped" not in done.stderr, done.stdout + done.stderr
