"""The commit that each committed result was made from, and the results whose benchmark has changed since.

  python benchmarks/provenance.py

A benchmark is the module that writes a result, with the modules of benchmarks/, sordino.bench and tests/planted that it
imports. Two versions of a module are the same where only comments, docstrings or layout differ. Changes of the code
that is measured are counted, not judged: somebody has to decide whether they matter.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
_ROOMS = (
    (ROOT / "benchmarks", ""),
    (ROOT / "python" / "sordino" / "bench", "sordino.bench"),
    (ROOT / "tests" / "planted", "planted"),
)
_SHOWING = {"evidence.py", "claim.py", "paper.py", "report.py", "tables.py", "pictures.py", "command_line.py"}
"""Modules that judge, describe or draw results: a change of them makes no result old."""
_CLAIMED = re.compile(r"\(([0-9a-f]{7,})\+?\)")  # in the line of a claim's file that names a machine


@dataclass(frozen=True)
class Origin:
    """Origin of one result.

    Attributes:
        file: of the result.
        commits: that it was made from, several where parts of it were made at different times; none is named: empty.
        modules: of the benchmark that wrote it.
    """

    file: Path
    commits: tuple[str, ...]
    modules: frozenset[Path]


def git(root: Path, *words: str) -> str:
    """Return the output of git. subprocess.CalledProcessError where it fails."""
    return subprocess.run(("git", *words), cwd=root, capture_output=True, text=True, check=True).stdout


def origins(results: Path = RESULTS) -> list[Origin]:
    """Return the origin of each JSON file in a folder of results."""
    return [_origin(file) for file in sorted(results.rglob("*.json"))]


def _origin(file: Path) -> Origin:
    found = json.loads(file.read_text(encoding="utf-8"))
    if "claim" in found:
        commits = [match[1] for line in found["machines"] if (match := _CLAIMED.search(line))]
        commits = commits if len(commits) == len(found["machines"]) else []
        starts = {_file_of(run["work"].partition(":")[0]) for run in found["runs"]}
    else:
        commit = str(found.get("machine", {}).get("commit", "")).rstrip("+")
        commits = [commit] if commit else []
        starts = {_writers().get(found.get("benchmark", ""))}
    return Origin(file, tuple(commits), frozenset(_closure(path for path in starts if path is not None)))


@cache
def _writers() -> dict[str, Path]:
    """Return the module that writes results with each name of a benchmark."""
    found = {}
    for folder, _ in _ROOMS:
        for path in folder.rglob("*.py"):
            for name in re.findall(r'"benchmark": "(\w+)"', path.read_text(encoding="utf-8")):
                found[name] = path
    return found


def _file_of(module: str) -> Path | None:
    for folder, prefix in _ROOMS:
        if module == prefix or (prefix and not module.startswith(f"{prefix}.")):
            continue
        place = folder.joinpath(*module.removeprefix(f"{prefix}.").split("."))
        for path in (place.with_suffix(".py"), place / "__init__.py"):
            if path.is_file():
                return path
    return None


def _closure(starts: Iterator[Path]) -> set[Path]:
    """Return these modules and those that they import, of the rooms where benchmarks are."""
    found: set[Path] = set()
    todo = list(starts)
    while todo:
        path = todo.pop()
        if path in found:
            continue
        found.add(path)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            todo += [file for name in names if (file := _file_of(name)) is not None]
    return {path for path in found if path.name not in _SHOWING}


def code_of(source: str) -> str:
    """Return a module's code without comments, docstrings and layout."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            node.body[0] = ast.Pass()
    return ast.dump(tree)


def changed(origin: Origin, root: Path = ROOT) -> list[str]:
    """Return the modules of a result's benchmark whose code is not what it was when the result was made.

    Raises:
        LookupError: the result names no commit, or one that this repository does not have.
    """
    if not origin.commits:
        raise LookupError("it names no commit")
    different = []
    for path in sorted(origin.modules):
        name = path.relative_to(root).as_posix()
        now = code_of(path.read_text(encoding="utf-8"))
        for commit in origin.commits:
            try:
                git(root, "cat-file", "-e", f"{commit}^{{commit}}")
            except subprocess.CalledProcessError:
                raise LookupError(f"its commit {commit} is not in this repository") from None
            try:
                before = code_of(git(root, "show", f"{commit}:{name}"))
            except (subprocess.CalledProcessError, SyntaxError):  # it was not there
                before = ""
            if before != now:
                different.append(name)
                break
    return different


def lines() -> Iterator[str]:
    """Yield a line for each result whose benchmark has changed, or whose origin is not known."""
    for origin in origins():
        name = origin.file.relative_to(ROOT).as_posix()
        try:
            different = changed(origin)
        except LookupError as error:
            yield f"{name}: {error}; measure it again or delete it"
            continue
        if different:
            oldest = origin.commits[0]
            since = git(ROOT, "rev-list", "--count", f"{oldest}..HEAD", "--", "csrc", "python").strip()
            what = f"{', '.join(different)} ({since} commits to the code)"
            yield f"{name}: made from {oldest}; since then changed: {what}"


if __name__ == "__main__":
    told = list(lines())
    print("\n".join(told) or "every result is as old as its benchmark")
    sys.exit(0)
