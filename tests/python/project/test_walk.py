"""What Python a steady step walks through stays as short as it is said to be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

WALK = Path(__file__).resolve().parents[3] / "benchmarks" / "walk.py"


def test_a_step_calls_few_functions_in_few_files() -> None:
    """In a process of its own: what others have wrapped a torch function in would be counted, too."""
    done = subprocess.run([sys.executable, str(WALK)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(name in done.stdout for name in ("allreduce", "crossover", "local-sgd"))
