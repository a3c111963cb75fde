"""The teaching examples: each trains, each algorithm has one, and `sordino examples` copies the files that they
need."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import shtab
import torch
from algorithm_table import has

from minimal import train
from sordino import sim
from sordino.algorithms import names, resolve
from sordino.cli import app, completion, examples
from sordino.torch.elastic import TorchState

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples"
MOST_LINES = 52  # longest output of `--help`, which is one screen


@pytest.mark.parametrize("name", names())
def test_the_example_trains_with_any_algorithm(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["interval=4"] if has(resolve(name), "interval") else []
    monkeypatch.setattr(sys, "argv", ["with_algorithm.py", name, *settings])
    sim.run(4, partial(runpy.run_path, str(EXAMPLES / "with_algorithm.py"), run_name="__main__"))
    found = re.search(r"on 4 rank\(s\): ([\d.]+)% right, [\d.]+ MB sent", capsys.readouterr().out)
    assert found and float(found[1]) > 70


def test_the_smallest_one_is_small_and_better_with_more_ranks_than_by_chance() -> None:
    text = (EXAMPLES / "minimal.py").read_text()
    assert len(text.splitlines()) <= 50 and text.split('"""\n\n', 1)[1] in (ROOT / "README.md").read_text()
    assert min(sim.run(2, train, "allreduce", 8)) > 0.85


def test_arrays_are_fitted_together(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # threads would share CuPy's current device
    sim.run(3, partial(runpy.run_path, str(EXAMPLES / "arrays.py"), run_name="__main__"))
    line = capsys.readouterr().out
    found = re.fullmatch(r"numpy: weights \[(.*)\], losses \[(.*)\]\n", line)
    assert found, line
    assert [float(word) for word in found[1].split(", ")] == pytest.approx([1, -2, 0.5], abs=2e-3)
    assert max(float(word) for word in found[2].split(", ")) < 2e-4


def test_ranks_may_change_at_the_last_batch_of_an_epoch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commit, commits = TorchState.commit, count(1)

    def interrupted(state: TorchState) -> None:
        now = next(commits)
        if now % 47 == 0:  # batches of an epoch
            state.on_hosts_updated(now, 2)
        commit(state)

    monkeypatch.setattr(TorchState, "commit", interrupted)
    monkeypatch.setattr(sys, "argv", ["elastic.py", "--epochs", "5", "--pause", "0"])
    sim.run(1, partial(runpy.run_path, str(EXAMPLES / "elastic.py"), run_name="__main__"))
    assert re.search(r"^epoch 5: loss 0\.\d+ on 1 ranks$", capsys.readouterr().out, re.MULTILINE)
    assert next(commits) == 5 * 47 + 1


def test_the_page_of_each_algorithm_says_when_to_use_it_and_how_to_try_it() -> None:
    for name in names():
        page = (ROOT / "docs" / "algorithms" / f"{name}.md").read_text()
        assert "Use it " in page and f"with_algorithm.py {name}" in page


def command(*words: str) -> int:
    return app.main(["examples", *words])


def test_examples_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert command() == 0
    listed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert set(listed) == {path.stem.replace("_", "-") for path in EXAMPLES.glob("*.py")}
    assert all(text.endswith((".", "options.")) for text in listed.values())


FILES = {"minimal": 1, "with-algorithm": 2, "with_algorithm.py": 2, "train": 8, "language": 6, "custom-algorithm": 1}


@pytest.mark.parametrize("name", FILES)
def test_an_example_is_copied_whole(name: str, tmp_path: Path) -> None:
    assert command(name, str(tmp_path / "mine")) == 0
    copied = [path for path in (tmp_path / "mine").rglob("*") if path.is_file()]
    assert len(copied) == FILES[name]
    if name in ("train", "language"):
        words = [sys.executable, str(tmp_path / "mine" / f"{name}.py"), "--help"]
        done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr


def test_nothing_is_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "minimal.py").write_text("mine")
    assert command("with-algorithm", str(tmp_path)) == 2
    assert "minimal.py" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["minimal.py"]
    assert (tmp_path / "minimal.py").read_text() == "mine"
    assert command("no-such") == 2
    assert "there is no example 'no-such'; use one of " in capsys.readouterr().err


def test_what_an_example_needs_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(examples, "find_spec", lambda name: None if name == "sklearn" else name)
    assert command("with-algorithm", str(tmp_path)) == 0
    assert "more packages: pip install scikit-learn\n" in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_completes(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["completion", shell]) == 0
    script = tmp_path / "completions"
    script.write_text(capsys.readouterr().out)
    if shell == "zsh":
        assert "simulate" in script.read_text()
        return
    for typed, wanted in (("sim", ["simulate"]), ("completion z", ["zsh"])):
        *before, last = words = ["sordino", *typed.split()]
        ask = f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(before)}; _shtab_sordino sordino {last} {before[-1]}"
        lines = f"source {script}; {ask}; echo ${{COMPREPLY[@]}}"
        done = subprocess.run(["bash", "-c", lines], capture_output=True, text=True)
        assert done.stdout.split() == wanted, done.stderr


def test_shells_are_those_of_the_library(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert set(completion.SHELLS) == set(shtab.SUPPORTED_SHELLS)
    with pytest.raises(SystemExit) as end:
        app.main(["completion", "ksh"])
    error = capsys.readouterr().err
    assert end.value.code == 2 and "invalid choice: 'ksh'" in error and "powershell" in error
    monkeypatch.setattr(shtab, "SUPPORTED_SHELLS", ["bash", "zsh"])
    assert app.main(["completion", "fish"]) == 2
    assert "knows bash, zsh, and not fish: pip install --upgrade shtab" in capsys.readouterr().err


def test_completion_without_its_library(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert app.main(["completion", "bash"]) == 2
    assert "needs the package shtab: pip install shtab" in capsys.readouterr().err


def test_only_completion_needs_its_library() -> None:
    """A machine to which Sordino is copied without the packages that it needs can start ranks."""
    hidden = (
        "import sys; sys.modules['shtab'] = None; from sordino.cli import app; sys.exit(app.main(['run', '--help']))"
    )
    done = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["", "run", "doctor", "examples", "plan", "simulate", "report", "bench", "completion"])
def test_help_fits_a_screen(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as end:
        app.main([name, "--help"] if name else ["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert end.value.code == 0 and len(lines) <= MOST_LINES and all(len(line) <= 120 for line in lines)
