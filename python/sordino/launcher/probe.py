"""Probes of installed libraries in a child process.

A compiled library may crash or hang while it is loaded, or be overwritten by a new build while a job runs for days.
This must not affect the doctor or the launcher, so they do not load it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

TIMEOUT_S = 60.0


def ask_python(program: str) -> tuple[dict[str, Any], str]:
    """Return the JSON object in the last line that a Python program prints, and an error text ("" on success)."""
    try:
        words = [sys.executable, "-c", program]
        answer = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return {}, "hangs while it is loaded"
    if answer.returncode < 0:
        return {}, f"crashes with signal {-answer.returncode} while it is loaded"
    try:
        result = json.loads(answer.stdout.strip().splitlines()[-1])
        if not isinstance(result, dict):
            raise ValueError("the last line is not a JSON object")
    except (ValueError, IndexError, RecursionError):
        lines = answer.stderr.strip().splitlines()
        return {}, lines[-1] if lines else f"exits with status {answer.returncode}"
    return result, ""
