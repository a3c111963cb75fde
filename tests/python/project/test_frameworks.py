"""The programs of docs/coming-from-frameworks.md train one model on two ranks, if their frameworks are installed.

No extra installs them, and CI does not have them, as they add hundreds of megabytes that nothing else uses here.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from checks.commands import launch

PROGRAMS = sorted((Path(__file__).resolve().parents[3] / "examples" / "frameworks").glob("*.py"))
RUN = """
import runpy, sys
names = runpy.run_path(sys.argv[1], run_name="__main__")
torch, hvd, model = names["torch"], names["hvd"], names["model"]
mine = torch.cat([one.detach().flatten() for one in model.parameters()])[None]
assert hvd.size() == 2 and (hvd.allgather(mine) == mine).all(), "ranks have other models"
assert (mine > 0.3).sum() > 4, "it has not learned that all weights are 1"
"""


@pytest.mark.framework
@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_a_framework_trains_one_model(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    framework = path.stem.partition("_")[0]
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed: pip install {framework}")
    monkeypatch.chdir(tmp_path)  # the programs write there
    done = launch("run", "-np", "2", "--", sys.executable, "-c", RUN, str(path), timeout=280)
    assert done.returncode == 0, done.stderr


def test_each_framework_of_the_page_has_its_program() -> None:
    assert [path.stem for path in PROGRAMS] == ["accelerate_training", "lightning_training", "transformers_training"]
