"""Buffers of FSDP2 and DDP in shared memory, in jobs of processes (shared_worker.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
from distributed_jobs import WORKER, assert_well, run
from mp.test_distributed import BACKENDS


@pytest.mark.drill("buffers in shared memory")
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_values_are_those_of_ordinary_memory(backend: str, size: int, tmp_path: Path) -> None:
    """Values are equal; memory is reused, and released with its group. Ranks are real processes, as each counts its
    mappings and files."""
    worker = WORKER.with_name("shared_worker.py")
    assert_well(run("all", size, tmp_path, backend=backend, worker=worker, real=True))
