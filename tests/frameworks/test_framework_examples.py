"""The programs of examples/frameworks reach the losses of their frameworks without Sordino, under each launcher."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import pytest
from frameworks.framework_jobs import ROOT, loss_of, need, run, run_command

pytestmark = pytest.mark.framework
PROGRAMS = ROOT / "examples" / "frameworks"
WAYS = [
    ("torchrun", ()),
    ("sordino run", ()),
    ("torchrun", ("--algorithm", "allreduce")),
    ("sordino run", ("--algorithm", "allreduce")),
]


@cache
def plain(framework: str, folder: Path) -> float:
    return loss_of(run("torchrun", folder, PROGRAMS / f"{framework}_training.py", "--plain"))


@pytest.mark.parametrize(("launcher", "words"), WAYS, ids=lambda value: value if isinstance(value, str) else value[1:])
@pytest.mark.parametrize("framework", ["lightning", "accelerate", "transformers"])
def test_losses_are_those_of_the_framework(
    framework: str, launcher: str, words: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    need(framework)
    folder = tmp_path_factory.getbasetemp()
    found = loss_of(run(launcher, folder, PROGRAMS / f"{framework}_training.py", *words))
    assert found == pytest.approx(plain(framework, folder), rel=1e-5)


@pytest.mark.parametrize("framework", ["lightning", "accelerate", "transformers"])
def test_local_sgd_learns(framework: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    need(framework)
    folder = tmp_path_factory.getbasetemp()
    found = loss_of(run("sordino run", folder, PROGRAMS / f"{framework}_training.py", "--algorithm", "local-sgd"))
    assert found < 1.5 * plain(framework, folder)


def test_losses_of_ray(tmp_path: Path) -> None:
    need("ray")
    command = [sys.executable, str(PROGRAMS / "ray_training.py")]
    plain = loss_of(run_command([*command, "--plain"], tmp_path))
    for words in ([], ["--algorithm", "allreduce"]):
        assert loss_of(run_command([*command, *words], tmp_path)) == pytest.approx(plain, rel=1e-5)
