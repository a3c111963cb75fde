"""Each committed result names the commit that it was made from, and a benchmark that has changed since is reported."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import provenance
from sordino.report import machines

HAS_HISTORY = (provenance.ROOT / ".git").exists()
MODULE = 'def measure():\n    """Return a time."""\n    return 1\n'


@pytest.mark.parametrize("origin", provenance.origins(), ids=lambda origin: origin.file.stem)
def test_a_result_names_its_commit(origin: provenance.Origin) -> None:
    assert origin.commits, f"{origin.file.name} names no commit: make it again, or write down the one it was made from"
    if origin.file.parent.name != "gpu":
        assert origin.modules, f"nothing in benchmarks/ or sordino.bench writes {origin.file.name}: delete it"


@pytest.mark.skipif(not HAS_HISTORY, reason="needs a clone with its history")
def test_the_commits_are_there() -> None:
    for commit in {commit for origin in provenance.origins() for commit in origin.commits}:
        provenance.git(provenance.ROOT, "merge-base", "--is-ancestor", commit, "HEAD")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "benchmark.py").write_text(MODULE)
    for words in (("init", "-q"), ("add", "-A"), ("-c", "user.name=x", "-c", "user.email=x", "commit", "-qm", "x")):
        subprocess.run(("git", *words), cwd=tmp_path, check=True)
    return tmp_path


def origin_in(repository: Path) -> provenance.Origin:
    commit = provenance.git(repository, "rev-parse", "HEAD").strip()
    return provenance.Origin(repository / "result.json", (commit,), frozenset({repository / "benchmark.py"}))


def test_another_measurement_is_told_from_other_words(repository: Path) -> None:
    origin, module = origin_in(repository), repository / "benchmark.py"
    assert provenance.changed(origin, repository) == []
    module.write_text(MODULE.replace("Return a time.", "Return seconds.") + "# a comment\n")
    assert provenance.changed(origin, repository) == []
    module.write_text(MODULE.replace("return 1", "return 2"))
    assert provenance.changed(origin, repository) == ["benchmark.py"]


def test_an_unknown_commit_is_told(repository: Path) -> None:
    origin = origin_in(repository)
    for commits, words in ((), "names no commit"), (("0123456789ab",), "is not in this repository"):
        with pytest.raises(LookupError, match=words):
            provenance.changed(provenance.Origin(origin.file, commits, origin.modules), repository)


def test_a_machine_names_the_commit_of_its_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert machines.commit() == ""
    if HAS_HISTORY:
        monkeypatch.chdir(provenance.ROOT / "tests")
        head = provenance.git(provenance.ROOT, "rev-parse", "HEAD").strip()
        assert head.startswith(machines.commit().rstrip("+")) and len(machines.commit()) >= 12
