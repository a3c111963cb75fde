"""Description of the machine that measures: its hardware and software, and the load from other processes."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from datetime import datetime, timezone
from pathlib import Path

import torch

import sordino
from sordino._core import build_info, kernels
from sordino.report import Results

BUSY = 0.1  # cores; if other processes use more, measurements are doubtful


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or platform.machine()
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else platform.machine()


def commit() -> str:
    """Return the commit of the Sordino checkout in the working directory; "" if there is none.

    A "+" at the end marks uncommitted changes of code.
    """
    code = ("csrc", "python", "benchmarks", "CMakeLists.txt")

    def git(*words: str) -> str:
        return subprocess.run(("git", *words), capture_output=True, text=True, check=True).stdout.strip()

    try:
        if not Path(git("rev-parse", "--show-toplevel"), "python", "sordino", "VERSION").is_file():
            return ""
        root = ":(top)"
        changed = git(
            "status", "--porcelain", "--", *(root + name for name in code), ":(top,exclude)benchmarks/results"
        )
        return git("rev-parse", "--short=12", "HEAD") + "+" * bool(changed)
    except (OSError, subprocess.CalledProcessError):
        return ""


def machine(mpi_library: str | None) -> Results:
    """Return properties that measurements depend on, without host name and paths. Callers add the load, `others`."""
    info = build_info()
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "cores_per_rank": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "sordino": sordino.__version__,
        "commit": commit(),
        "compiler": info["compiler"],
        "instruction_set": kernels.level(),
        "mpi": without_paths(mpi_library or "no MPI"),
    }


def without_paths(text: str) -> str:
    """Return the text with absolute paths cut to their last part, because results may be published."""
    return re.sub(r"(?<![\w.])(?:/[\w.+@-]+)+/([\w.+@-]+)", r"\1", text)


def describe_machine(found: Results) -> str:
    """Describe the result of `machine`, and the load, in one paragraph."""
    return (
        f"{found['cpu']}, {found['cores']} cores of which a rank may use "
        f"{found['cores_per_rank']} ({found['instruction_set']} kernels), {found['kernel']}, Python "
        f"{found['python']}, torch {found['torch']}, Sordino {found['sordino']}, {found['mpi']}; {found['date']}"
        f"{describe_others(found['others'])}."
    )


def describe_others(cores: float | None) -> str:
    """Return the load from other processes during a measurement, as the end of a sentence; "" if it is unknown."""
    if cores is None:
        return ""
    warning = ": **a busy machine, take the numbers with care**" if cores > BUSY else ""
    return f"; other processes used {cores:.2f} cores{warning}"
