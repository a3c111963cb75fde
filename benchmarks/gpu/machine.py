"""Description of the machine of a check, without host name and paths. It imports nothing of Sordino."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

_PACKAGES = ("torch", "numpy", "pybind11", "pytest")
# Run in its own process, because a process that uses CUDA holds memory on each GPU.
_ASK_TORCH = """
import json, torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
every = [torch.cuda.get_device_properties(k) for k in range(count)]
print(json.dumps([[one.name, one.total_memory >> 20, f"{one.major}{one.minor}"] for one in every]))
"""


def _said(environment: Mapping[str, str], *words: str) -> str:
    """Return the output of a command; an empty string if it fails or is not installed."""
    try:
        done = subprocess.run(words, env=dict(environment), capture_output=True, text=True, timeout=120, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _installed(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"no {package}"


def _commit(environment: Mapping[str, str]) -> str:
    """Return the commit of the working directory, with "+" if code has changed since; "" outside of a repository."""
    commit = _said(environment, "git", "rev-parse", "--short=12", "HEAD")
    changed = _said(environment, "git", "status", "--porcelain", "--", "csrc", "python", "benchmarks/*.py")
    return commit + "+" * bool(commit and changed)


def describe(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the GPUs that torch sees, their driver and architecture, the compiler, the MPI, versions and commit."""
    gpus = json.loads(_said(environment, sys.executable, "-c", _ASK_TORCH) or "[]")
    driver = _said(environment, "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0]
    nvcc = re.search(r"release [\d.]+", _said(environment, "nvcc", "--version"))
    mpi = _said(environment, "mpirun", "--version").partition("\n")[0]
    return {
        "gpus": [f"{name}, {mebibytes} MiB" for name, mebibytes, _ in gpus],
        "driver": driver,
        "architecture": gpus[0][2] if gpus else "",
        "nvcc": nvcc[0] if nvcc else "none",
        "mpi": mpi or "none",
        "python": platform.python_version(),
        "packages": [_installed(package) for package in _PACKAGES],
        "commit": _commit(environment),
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}, {os.cpu_count()} cores",
    }


def name(found: Mapping[str, Any]) -> str:
    """Return the GPUs of a machine in words, or an empty string."""
    gpus = found["gpus"]
    if not gpus:
        return ""
    model = gpus[0].partition(",")[0]
    return model if len(gpus) == 1 else f"{len(gpus)} {model}"
