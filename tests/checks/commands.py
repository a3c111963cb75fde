"""Helpers for tests of the command `sordino`: they start it as a user does, and make a fake mpirun."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from pace import HANG_S

SORDINO = [sys.executable, "-m", "sordino.cli"]


def launch(*words: str, timeout: float = HANG_S) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*SORDINO, *words], capture_output=True, text=True, timeout=timeout)


def fake_mpirun(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "mpirun"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path
