"""Lightning with `SordinoStrategy`: losses, clipping, accumulation, bf16, checkpoints and validation."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from frameworks.framework_jobs import LAUNCHERS, need, results_of, run, run_command
from pace import HANG_S

pytestmark = pytest.mark.framework
WORKER = Path(__file__).with_name("lightning_worker.py")
LOSSES = ("clipped and accumulated", "bf16", "clipped by value")


@cache
def plain(folder: Path) -> dict[str, Any]:
    return results_of(run("torchrun", folder, WORKER, "plain"))


@pytest.mark.parametrize("launcher", ["torchrun", "sordino run", "mpirun"])
@pytest.mark.parametrize("kind", ["ddp", "allreduce"])
def test_it_trains_as_lightning_does(
    kind: str, launcher: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    need("lightning")
    found, wanted = results_of(run(launcher, tmp_path, WORKER, kind)), plain(tmp_path_factory.getbasetemp())
    for name in LOSSES:
        assert found[name] == pytest.approx(wanted[name], rel=1e-5), name
    assert found["resumed"] == found["uninterrupted"]


@pytest.mark.parametrize("kind", ["local-sgd", "shards", "crossover", "push-sum", "layered", "double buffering"])
def test_algorithms_learn_and_resume(kind: str, tmp_path: Path) -> None:
    need("lightning")
    found = results_of(run("sordino run", tmp_path, WORKER, kind))
    for name in ("clipped and accumulated", "bf16"):
        assert sum(found[name][-9:-1]) < sum(found[name][:8]), name
    assert found["same model"]
    if kind in ("shards", "layered"):  # one model, and one state
        assert found["resumed"] == pytest.approx(found["uninterrupted"], rel=1e-5)
    # Otherwise all ranks resume with Adam's moments of rank 0. With local SGD, an epoch ends with an averaging.
    if kind == "local-sgd":
        assert found["resumed"][0] == pytest.approx(found["uninterrupted"][0], rel=1e-5)
    assert found["resumed"] == pytest.approx(found["uninterrupted"], rel=0.1)
    if kind not in ("layered", "double buffering"):
        assert found["state"]["steps"] == 12, found["state"]


def test_lightning_starts_the_ranks_itself(tmp_path: Path) -> None:
    need("lightning")
    program = Path(__file__).parents[2] / "examples" / "frameworks" / "lightning_training.py"
    output = run_command([sys.executable, str(program), "--algorithm", "allreduce"], tmp_path)
    assert output.count("loss ") == 1


LOST = """
import os, signal
import lightning, torch
from lightning.pytorch.demos.boring_classes import BoringModel
from sordino.integrations.lightning import SordinoStrategy

class Model(BoringModel):
    def training_step(self, batch, index):
        if index == 5 and self.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, index)

quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
strategy = SordinoStrategy(algorithm="allreduce")
lightning.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, **quiet).fit(Model())
"""


def test_a_lost_rank_is_named(tmp_path: Path) -> None:
    need("lightning")
    script = tmp_path / "lost.py"
    script.write_text(LOST)
    command = [*LAUNCHERS["sordino run"], str(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode != 0
    assert "PeerLost" in done.stderr and "rank 1" in done.stderr, done.stderr


WRONG = """
import lightning
from lightning.pytorch.demos.boring_classes import BoringModel
from sordino.integrations.lightning import SordinoStrategy
trainer = lightning.Trainer(accelerator="cpu", devices=1, strategy="sordino", logger=False)
try:
    trainer.fit(BoringModel())
except ValueError as error:
    print("refused:", error, flush=True)
"""


def test_a_wrong_number_of_devices_is_refused(tmp_path: Path) -> None:
    need("lightning")
    script = tmp_path / "wrong.py"
    script.write_text(WRONG)
    output = run("sordino run", tmp_path, script)
    assert output.count("the launcher has started 2 ranks. Use devices=2, num_nodes=1") == 2, output
