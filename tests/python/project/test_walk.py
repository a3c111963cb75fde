"""The Python code that a steady step runs stays as short as documented."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

WALK = Path(__file__).resolve().parents[3] / "benchmarks" / "walk.py"


def test_a_step_calls_few_functions_in_few_files() -> None:
    """This runs in a process of its own, as wrappers of torch functions by other tests would be counted, too."""
    done = subprocess.run([sys.executable, str(WALK)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(name in done.stdout for name in ("allreduce", "crossover", "local-sgd"))
