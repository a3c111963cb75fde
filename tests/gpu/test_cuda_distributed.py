"""torch.distributed's backend "sordino" with tensors of a GPU, which two ranks share if there is only one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from distributed_jobs import WORKER, assert_well, run

pytestmark = pytest.mark.gpu


def test_every_operation(tmp_path: Path) -> None:
    assert_well(run("operations", 2, tmp_path, device="cuda"))


def test_losses_are_those_of_the_cpu(tmp_path: Path) -> None:
    found = {}
    for device in ("cuda", "cpu"):
        out = tmp_path / device
        assert_well(run("training", 2, tmp_path / f"on {device}", str(out), device=device))
        found[device] = json.loads(out.read_text())
    for kind, losses in found["cuda"].items():
        assert losses == pytest.approx(found["cpu"][kind], rel=1e-3 if "bfloat16" not in kind else 0.05), kind


def test_encoded_gradients_of_ddp_have_the_bits_of_the_cpu(tmp_path: Path) -> None:
    worker = WORKER.with_name("encoded_worker.py")
    assert_well(run("encoded", 2, tmp_path, device="cuda", worker=worker))
