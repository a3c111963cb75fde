"""Asks a child process about what is installed.

A compiled library may crash or hang while it is loaded, or be overwritten by a new build while a job runs for days. It
must take down neither the doctor nor the launcher, so neither of them loads it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

TIMEOUT_S = 60.0


def ask_python(program: str) -> tuple[dict[str, Any], str]:
    """Return the JSON object that a Python program prints last, and what went wrong ("" if nothing)."""
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
            raise ValueError("it has printed something else last")
    except (ValueError, IndexError, RecursionError):
        lines = answer.stderr.strip().splitlines()
        return {}, lines[-1] if lines else f"exits with status {answer.returncode}"
    return result, ""
