"""The Trainer of transformers with an algorithm: losses, accumulation, bf16, evaluation and checkpoints."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from frameworks.framework_jobs import need, results_of, run

pytestmark = pytest.mark.framework
WORKER = Path(__file__).with_name("transformers_worker.py")


@cache
def plain(folder: Path) -> dict[str, Any]:
    return results_of(run("torchrun", folder, WORKER, "plain"))


@pytest.mark.parametrize("launcher", ["torchrun", "sordino run"])
@pytest.mark.parametrize("kind", ["ddp", "allreduce"])
def test_it_trains_as_transformers_does(
    kind: str, launcher: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    need("transformers", "accelerate")
    found, wanted = results_of(run(launcher, tmp_path, WORKER, kind)), plain(tmp_path_factory.getbasetemp())
    for name in ("accumulated", "uninterrupted", "evaluated"):
        assert found[name] == pytest.approx(wanted[name], rel=1e-4), name
    assert found["bf16"] == pytest.approx(wanted["bf16"], rel=1e-3)  # a rounded weight may become another bfloat16
    assert found["resumed"] == pytest.approx(found["uninterrupted"], rel=1e-6)


@pytest.mark.parametrize("kind", ["local-sgd", "shards", "crossover"])
def test_algorithms_learn_and_resume(kind: str, tmp_path: Path) -> None:
    need("transformers", "accelerate")
    found = results_of(run("sordino run", tmp_path, WORKER, kind))
    for name in ("accumulated", "bf16"):
        assert found[name][-2] < found[name][0], name
    assert found["evaluated"][1] < found["evaluated"][0] and found["saved is final"]
    assert found["state"]["steps"] == 8
    if kind == "shards":  # one model, and one state of which each rank has a part
        assert found["resumed"] == pytest.approx(found["uninterrupted"], rel=1e-5)
    # Otherwise all ranks resume with Adam's moments of rank 0. With local SGD, the checkpoint follows an averaging.
    if kind == "local-sgd":
        assert found["resumed"][0] == pytest.approx(found["uninterrupted"][0], rel=1e-5)
    assert found["resumed"] == pytest.approx(found["uninterrupted"], rel=0.05)


ALONE = """
import torch, transformers
from sordino.integrations.transformers import Trainer
config = transformers.GPT2Config(vocab_size=8, n_positions=4, n_embd=4, n_layer=1, n_head=1)
arguments = transformers.TrainingArguments(output_dir="out", use_cpu=True, report_to=[])
try:
    Trainer(transformers.GPT2LMHeadModel(config), arguments, algorithm="allreduce")
except ValueError as error:
    print("refused:", error, flush=True)
"""


def test_arguments_that_do_not_know_the_ranks_are_refused(tmp_path: Path) -> None:
    need("transformers", "accelerate")
    script = tmp_path / "alone.py"
    script.write_text(ALONE)
    output = run("sordino run", tmp_path, script)
    assert output.count("the launcher has started 2 ranks. Use sordino.integrations") == 2, output
