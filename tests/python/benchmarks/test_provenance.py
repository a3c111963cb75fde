"""Each committed result names the commit that it was made from, and a benchmark that has changed since is reported."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import provenance
from sordino.report import machines

HAS_HISTORY = (provenance.ROOT / ".git").exists()
MODULE = """from sizes import SIZE

def measure():
    # A comment.
    return take(SIZE)

def take(size):
    return 1

def judge():
    return 2
"""
START = ("benchmarks/benchmark.py", "measure")


@pytest.mark.parametrize("origin", provenance.origins(), ids=lambda origin: origin.file.stem)
def test_a_result_names_its_commit(origin: provenance.Origin) -> None:
    assert origin.commits, f"{origin.file.name} names no commit: make it again, or write down the one it was made from"
    if origin.file.parent.name != "gpu":
        assert origin.starts, f"nothing in benchmarks/ or sordino.bench writes {origin.file.name}: delete it"


@pytest.mark.skipif(not HAS_HISTORY, reason="needs a clone with its history")
def test_the_commits_are_there() -> None:
    for commit in {commit for origin in provenance.origins() for commit in origin.commits}:
        provenance.git(provenance.ROOT, "merge-base", "--is-ancestor", commit, "HEAD")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "benchmark.py").write_text(MODULE)
    (tmp_path / "benchmarks" / "sizes.py").write_text("SIZE = 4\nOTHER = 5\n")
    commit(tmp_path, "init", "-q")
    return tmp_path


def commit(repository: Path, *first: str) -> None:
    """Commit everything, after an optional first git command."""
    name = ("-c", "user.name=x", "-c", "user.email=x", "commit", "-qm", "x")
    for words in (*([first] if first else []), ("add", "-A"), name):
        subprocess.run(("git", *words), cwd=repository, check=True)


def origin_in(repository: Path, start: provenance.Start = START) -> provenance.Origin:
    commit = provenance.git(repository, "rev-parse", "HEAD").strip()
    return provenance.Origin(repository / "result.json", (commit,), frozenset({start}))


def replace(file: Path, old: str, new: str) -> None:
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))


def test_another_measurement_is_told_from_other_words(repository: Path) -> None:
    """Code that the measurement does not use, and text that does not run, make no result old."""
    origin, module = origin_in(repository), repository / "benchmarks" / "benchmark.py"
    assert provenance.changed(origin, repository) == []
    replace(module, "# A comment.", "# Another one.")
    replace(module, "return 2", "return 3")
    replace(module.with_name("sizes.py"), "OTHER = 5", "OTHER = 6")
    assert provenance.changed(origin, repository) == []
    replace(module, "return 1", "return 2")
    assert provenance.changed(origin, repository) == ["take"]
    replace(module.with_name("sizes.py"), "SIZE = 4", "SIZE = 5")
    assert provenance.changed(origin, repository) == ["SIZE", "take"]


def test_a_move_to_another_module_makes_no_result_old(repository: Path) -> None:
    origin, module = origin_in(repository), repository / "benchmarks" / "benchmark.py"
    moved = module.with_name("moved.py")
    moved.write_text(MODULE.replace("sizes", "numbers"))
    module.with_name("sizes.py").rename(module.with_name("numbers.py"))
    module.unlink()
    commit(repository)
    there = provenance.Origin(origin.file, origin.commits, frozenset({("benchmarks/moved.py", "measure")}))
    assert provenance.changed(there, repository) == []
    replace(moved, "return 1", "return 2")
    assert provenance.changed(there, repository) == ["take"]


def test_a_worker_is_known_by_the_name_of_its_module(repository: Path) -> None:
    module = repository / "benchmarks" / "benchmark.py"
    module.with_name("worker.py").write_text("def main():\n    return 7\n")
    (repository / "benchmarks" / "parts").mkdir()
    (repository / "benchmarks" / "parts" / "worker.py").write_text("def main():\n    return 8\n")
    replace(module, "return 1", 'return run("parts.worker")')
    commit(repository)
    origin = origin_in(repository)
    replace(module.with_name("worker.py"), "7", "9")
    assert provenance.changed(origin, repository) == []
    replace(repository / "benchmarks" / "parts" / "worker.py", "8", "9")
    assert provenance.changed(origin, repository) == ["main"]


def test_an_unknown_commit_is_told(repository: Path) -> None:
    origin = origin_in(repository)
    for commits, words in ((), "names no commit"), (("0123456789ab",), "is not in this repository"):
        with pytest.raises(LookupError, match=words):
            provenance.changed(provenance.Origin(origin.file, commits, origin.starts), repository)


def test_a_machine_names_the_commit_of_its_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert machines.commit() == ""
    if HAS_HISTORY:
        monkeypatch.chdir(provenance.ROOT / "tests")
        head = provenance.git(provenance.ROOT, "rev-parse", "HEAD").strip()
        assert head.startswith(machines.commit().rstrip("+")) and len(machines.commit()) >= 12
