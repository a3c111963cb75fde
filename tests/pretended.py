"""GPUs that are threads, and an NCCL that works with them, for tests on machines without GPUs and NCCL."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

import pytest

import sordino
from sordino._core import Device, sim_device

_BUILT = (
    Path(os.environ.get("SORDINO_CPP_TESTS", "")) / "libfake_nccl.so",
    Path(__file__).resolve().parents[1] / "build" / "tree" / "tests" / "cpp" / "libfake_nccl.so",
)


def built_stand_in_for_nccl() -> Path | None:
    """Return the library that `make test` has built from tests/cpp/fake_nccl.cc."""
    return next((path for path in _BUILT if path.is_file()), None)


@cache
def stand_in_for_nccl() -> Path:
    """Return the stand-in for NCCL, set to use simulated queues. Skips the test if it is not built."""
    path = built_stand_in_for_nccl()
    if path is None:
        pytest.skip("needs libfake_nccl.so: `make test` builds it")
    core = ctypes.CDLL(str(Path(sordino.__file__).with_name("libsordino.so")))
    fake = ctypes.CDLL(str(path))
    fake.fake_nccl_set_enqueue(ctypes.cast(core.sordino_sim_enqueue, ctypes.c_void_p))
    return path


def devices(kind: str, size: int, monkeypatch: pytest.MonkeyPatch) -> list[Device]:
    """Return GPUs for this number of ranks; set the environment for one route: "direct" (all ranks use one GPU and map
    its memory), "unshared" (they cannot map it), "staged" (the environment forbids it), or "nccl" (one GPU per
    rank)."""
    monkeypatch.setenv("SORDINO_TIMEOUT_S", os.environ.get("SORDINO_TIMEOUT_S", "60"))
    monkeypatch.setenv("SORDINO_GPU_ROUTE", "host" if kind == "staged" else "")
    if kind == "nccl":
        monkeypatch.setenv("SORDINO_NCCL", str(stand_in_for_nccl()))
        return [sim_device(number, takes_nccl=True) for number in range(size)]
    return [sim_device(0, shares=kind != "unshared")]
