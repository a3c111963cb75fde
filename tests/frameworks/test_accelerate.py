"""Accelerate with `SordinoAccelerator`: losses, clipping, accumulation, bf16, and saved states."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from frameworks.framework_jobs import need, results_of, run

pytestmark = pytest.mark.framework
WORKER = Path(__file__).with_name("accelerate_worker.py")
LOSSES = ("clipped and accumulated", "bf16", "the optimizer before the model")


@cache
def plain(folder: Path) -> dict[str, Any]:
    return results_of(run("torchrun", folder, WORKER, "plain"))


@pytest.mark.parametrize("launcher", ["torchrun", "sordino run", "mpirun"])
@pytest.mark.parametrize("kind", ["ddp", "allreduce"])
def test_it_trains_as_accelerate_does(
    kind: str, launcher: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    need("accelerate")
    found, wanted = results_of(run(launcher, tmp_path, WORKER, kind)), plain(tmp_path_factory.getbasetemp())
    for name in LOSSES:
        assert found[name] == pytest.approx(wanted[name], rel=1e-5), name
    assert found["resumed"] == found["uninterrupted"]
    assert found["backend"] == ["sordino", "sordino"]


@pytest.mark.parametrize("kind", ["local-sgd", "shards", "crossover"])
def test_algorithms_learn_and_resume(kind: str, tmp_path: Path) -> None:
    need("accelerate")
    found = results_of(run("sordino run", tmp_path, WORKER, kind))
    for name in LOSSES:
        assert sum(found[name][-4:]) < sum(found[name][:4]), name
    if kind == "shards":  # one model, and one state of which each rank has a part
        assert found["resumed"] == pytest.approx(found["uninterrupted"], rel=1e-5)
    # Otherwise all ranks resume with Adam's moments of rank 0. With local SGD, the checkpoint follows an averaging.
    if kind == "local-sgd":
        assert found["resumed"][0] == pytest.approx(found["uninterrupted"][0], rel=1e-5)
    assert found["resumed"] == pytest.approx(found["uninterrupted"], rel=0.05)
