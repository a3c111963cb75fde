"""`sordino.distributed.hooks` in jobs of processes (hooks_worker.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
from distributed_jobs import WORKER, assert_well, run


@pytest.mark.soak  # test_mesh.py has these in its job of two ranks
@pytest.mark.parametrize("backend", ["sordino", "gloo"])
@pytest.mark.parametrize("size", [2, 3])
def test_hooks_do_what_those_of_torch_do(size: int, backend: str, tmp_path: Path) -> None:
    assert_well(run("all", size, tmp_path, backend=backend, worker=WORKER.with_name("hooks_worker.py")))


@pytest.mark.parametrize("size", [2, 3])
def test_encoded_gradients_have_the_same_bits_on_all_ranks(size: int, tmp_path: Path) -> None:
    """The worker's part for a GPU is in tests/gpu/test_cuda_distributed.py."""
    assert_well(run("encoded", size, tmp_path, worker=WORKER.with_name("encoded_worker.py")))
