"""The stand-in for CUDA (tests/cuda_on_cpu) in place of a GPU, for tests in Python.

Sordino looks for libsordino_cuda.so next to its core, and the stand-in's library must not be in the installed package.
So processes that use the stand-in get a package of their own: a folder of links to the installed files and to that
library.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

import sordino

_NAME = Path("cuda_on_cpu") / "plugin" / "libsordino_cuda.so"
_TREES = (
    Path(os.environ.get("SORDINO_CPP_TESTS", "")).parent,
    Path(__file__).resolve().parents[1] / "build" / "tree" / "tests",
)


def library() -> Path:
    path = next((tree / _NAME for tree in _TREES if (tree / _NAME).is_file()), None)
    if path is None:
        pytest.skip("needs the stand-in for CUDA: `make test` builds it, on x86-64")
    return path


def environment(folder: Path, devices: int = 1, queues: int = 8) -> dict[str, str]:
    """Make a package with the stand-in in the folder; return the variables of processes that use it.

    Args:
        folder: a folder that has no entry "package".
        devices: number of GPUs.
        queues: hardware queues of a process, 8 by default on a GPU. Ranks that are threads share them, and need more.
    """
    built, home = library(), Path(sordino.__file__).parent
    package = folder / "package" / "sordino"
    package.mkdir(parents=True)
    for path in home.iterdir():
        if path.name not in ("__pycache__", built.name):
            (package / path.name).symlink_to(path)
    (package / built.name).symlink_to(built)
    paths = [str(package.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "PYTHONPATH": os.pathsep.join(paths),
        "CUDA_ON_CPU_PRETEND": "1",
        "CUDA_ON_CPU_DEVICES": str(devices),
        "CUDA_DEVICE_MAX_CONNECTIONS": str(queues),
    }


def use_for_nccl(fake_nccl: Path) -> None:
    """Make the stand-in for NCCL put its work on streams of the stand-in for CUDA, in a process that uses both."""
    runtime = ctypes.CDLL(str(library().parents[1] / "libcuda_on_cpu.so"))
    fake = ctypes.CDLL(str(fake_nccl))
    fake.fake_nccl_set_enqueue(ctypes.cast(runtime.cuda_on_cpu_enqueue, ctypes.c_void_p))
