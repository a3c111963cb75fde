"""Commit from which each committed result was made, and the results whose benchmark has changed since.

  python benchmarks/provenance.py

A benchmark is the code that measures: the function that a claim's run names, or the module that writes a result, with
every definition in benchmarks/, sordino.bench and tests/planted that it uses, directly or not. Two versions of a
definition are the same if only comments, docstrings or layout differ, or if it has moved to another module. Of changes
to the measured code only the number is printed. A person has to decide whether they matter.

Each planted error is a result of its own: the script counts the errors that are new or have changed since the last try.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
_FOLDERS = {"": "benchmarks", "sordino.bench": "python/sordino/bench", "planted": "tests/planted"}  # of packages
_SHOWING = frozenset(
    f"{name}.py"
    for name in (
        "evidence",
        "claim",
        "paper",
        "papers",
        "report",
        "tables",
        "pictures",
        "targets",
        "command_line",
        "parts",
    )
)
"""Modules that judge, describe or draw results, or parse options. A change of them makes no result outdated."""
_REWRITTEN = {
    "ParameterSkipping": "CaPS",
    '"elasticaveraging"': '"elastic-averaging"',
    '"pushsum"': '"push-sum"',
    '"segmentedgossip"': '"segmented-gossip"',
    "; known are {', '": "; use some of {', '",
    "sum_of_losses += float(loss)": "sum_of_losses += loss.item()",
}
"""Former spellings and what replaces them, for sources of earlier commits."""
_NAMED = re.compile(r"(\w+(?:\.\w+)+)(?::\w+)?")  # a module, or a function of one
_CLAIMED = re.compile(r"\(([0-9a-f]{7,})\+?\)")  # the commit in a claim's line about a machine

Start = tuple[str, str]
"""File and name of a definition; the name "" means all definitions of the file."""


@dataclass(frozen=True)
class Origin:
    """Origin of one result.

    Attributes:
        file: file of the result.
        commits: commits from which its parts were made; empty if it names none.
        starts: definitions with which the measurement begins.
    """

    file: Path
    commits: tuple[str, ...]
    starts: frozenset[Start]


def git(root: Path, *words: str) -> str:
    """Return the output of git. subprocess.CalledProcessError if it fails."""
    return subprocess.run(("git", *words), cwd=root, capture_output=True, text=True, check=True).stdout


def origins(results: Path = RESULTS) -> list[Origin]:
    """Return the origin of each JSON file in a folder of results."""
    tree = Tree(ROOT)
    return [_origin(file, tree) for file in sorted(results.rglob("*.json"))]


def _origin(file: Path, tree: Tree) -> Origin:
    found = json.loads(file.read_text(encoding="utf-8"))
    if "claim" in found:
        commits = [match[1] for line in found["machines"] if (match := _CLAIMED.search(line))]
        commits = commits if len(commits) == len(found["machines"]) else []
        works = {tuple(run["work"].split(":")) for run in found["runs"]}
        starts = {(path, name) for module, name in works if (path := tree.file_of(module)) is not None}
    elif found.get("benchmark") == "planted":
        commits = sorted({row["commit"].rstrip("+") for row in found["errors"]})
        starts = {("tests/planted/tree.py", "")}
    else:
        commit = str(found.get("machine", {}).get("commit", "")).rstrip("+")
        commits = [commit] if commit else []
        starts = {(path, "") for path in _writers().get(found.get("benchmark", ""), ())}
    return Origin(file, tuple(commits), frozenset(starts))


@cache
def _writers() -> dict[str, tuple[str, ...]]:
    """Return the files that write each benchmark's results, by name."""
    found: dict[str, tuple[str, ...]] = {}
    for folder in _FOLDERS.values():
        for path in (ROOT / folder).rglob("*.py"):
            for name in re.findall(r'"benchmark": "(\w+)"', path.read_text(encoding="utf-8")):
                found[name] = (*found.get(name, ()), path.relative_to(ROOT).as_posix())
    return found


class Tree:
    """The modules of benchmarks, in the working tree or at a commit.

    Args:
        root: root of the repository.
        commit: commit to read; None: the working tree.
    """

    def __init__(self, root: Path, commit: str | None = None) -> None:
        self._root, self._commit = root, commit
        if commit is None:
            paths = (path for folder in _FOLDERS.values() for path in (root / folder).rglob("*.py"))
            self._files = {path.relative_to(root).as_posix() for path in paths}
        else:
            self._files = set(git(root, "ls-tree", "-r", "--name-only", commit).splitlines())
        self._modules: dict[str, _Module] = {}

    def file_of(self, module: str) -> str | None:
        """Return the file of a module in one of the folders `_FOLDERS`; None for other modules."""
        for prefix, folder in _FOLDERS.items():
            if module == prefix or (prefix and not module.startswith(f"{prefix}.")):
                continue
            place = "/".join([folder, *filter(None, module.removeprefix(f"{prefix}.").split("."))])
            for path in (f"{place}.py", f"{place}/__init__.py"):
                if path in self._files:
                    return path
        return None

    def module(self, path: str) -> _Module | None:
        """Return the module of a file; None if there is no such file, or if it is in `_SHOWING`."""
        if path not in self._files or Path(path).name in _SHOWING:
            return None
        if path not in self._modules:
            source = (
                (self._root / path).read_text(encoding="utf-8")
                if self._commit is None
                else git(self._root, "show", f"{self._commit}:{path}")
            )
            if self._commit is not None:
                for former, now in _REWRITTEN.items():
                    source = source.replace(former, now)
            self._modules[path] = _Module(source, self)
        return self._modules[path]

    def definitions(self, starts: frozenset[Start]) -> dict[str, list[str]]:
        """Return the code of the definitions `starts`, and of all that they use, by name."""
        found: dict[Start, str] = {}
        todo = list(starts)
        while todo:
            path, name = todo.pop()
            module = self.module(path)
            if module is None or (path, name) in found:
                continue
            if not name:
                todo += [(path, one) for one in module.code]
            elif name in module.code:
                found[path, name] = module.code[name]
                todo += [(path if file is None else file, one) for file, one in module.uses(name)]
            elif name in module.imports:
                todo.append(module.imports[name])
        by_name = defaultdict(list)
        for (_, name), code in sorted(found.items()):
            by_name[name].append(code)
        return {name: sorted(codes) for name, codes in by_name.items()}


class _Module:
    """One parsed module: its definitions, and the targets of its imports.

    Attributes:
        code: code of each definition without comments, docstrings and layout.
        imports: file and name of each imported definition or module of these folders; a module has the name "".
    """

    def __init__(self, source: str, tree: Tree) -> None:
        self._tree = tree
        self._nodes: dict[str, list[ast.stmt]] = defaultdict(list)
        self.imports: dict[str, Start] = {}
        for node in ast.parse(source).body:
            if isinstance(node, ast.Import):
                self._note_modules(node)
            elif isinstance(node, ast.ImportFrom):
                self._note_names(node)
            elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                self._nodes[node.name].append(node)
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    for one in ast.walk(target):
                        if isinstance(one, ast.Name) and not one.id.endswith(
                            "CLAIM"
                        ):  # a claim's text and judgment are no measurement
                            self._nodes[one.id].append(node)
        self.code = {name: "".join(map(self._dump, nodes)) for name, nodes in self._nodes.items()}

    def _note_modules(self, node: ast.Import) -> None:
        for alias in node.names:
            if (path := self._tree.file_of(alias.name)) is not None:
                self.imports[alias.asname or alias.name.partition(".")[0]] = (path, "")

    def _note_names(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            name = alias.asname or alias.name
            inner, outer = self._tree.file_of(f"{node.module}.{alias.name}"), self._tree.file_of(node.module or "")
            if inner is not None:
                self.imports[name] = (inner, "")
            elif outer is not None:
                self.imports[name] = (outer, alias.name)

    def uses(self, name: str) -> Iterator[tuple[str | None, str]]:
        """Yield file and name of each definition that a definition uses; the file None is this module's."""
        for node in self._nodes[name]:
            attributes = set()
            for one in ast.walk(node):
                if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name):
                    path, whole = self.imports.get(one.value.id, ("", "x"))
                    if whole == "":
                        attributes.add(one.value.id)
                        yield path, one.attr
            for one in ast.walk(node):
                if isinstance(one, ast.Name) and one.id in self.code:
                    yield None, one.id
                elif isinstance(one, ast.Name) and one.id in self.imports and one.id not in attributes:
                    yield self.imports[one.id]
                elif (file := self._worker(one)) is not None:
                    yield file, ""

    def _worker(self, node: ast.AST) -> str | None:
        """Return the file of the module that a string names; None for other nodes."""
        text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
        named = _NAMED.fullmatch(text)
        return self._tree.file_of(named[1]) if named else None

    def _dump(self, node: ast.stmt) -> str:
        copy = ast.parse(ast.unparse(node)).body[0]
        for one in ast.walk(copy):
            if isinstance(one, (ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(one) is not None:
                one.body[0] = ast.Pass()
            elif isinstance(one, ast.Constant) and self._worker(one) is not None:  # a module that may have moved
                text = str(one.value)
                one.value = text.rpartition(":" if ":" in text else ".")[2]
        return ast.dump(copy)


def changed(origin: Origin, root: Path = ROOT) -> list[str]:
    """Return the names of the benchmark's definitions whose code has changed since the result was made.

    Raises:
        LookupError: the result names no commit, or one that this repository does not have.
    """
    if not origin.commits:
        raise LookupError("it names no commit")
    now = Tree(root).definitions(origin.starts)
    different: set[str] = set()
    for commit in origin.commits:
        try:
            git(root, "cat-file", "-e", f"{commit}^{{commit}}")
        except subprocess.CalledProcessError:
            raise LookupError(f"its commit {commit} is not in this repository") from None
        former = _former_names(root, commit)
        starts = frozenset((former.get(path, path), name) for path, name in origin.starts)
        before = _at(root, commit).definitions(starts)
        different |= {name for name in {*now, *before} if now.get(name) != before.get(name)}
    return sorted(different)


@cache
def _at(root: Path, commit: str) -> Tree:
    return Tree(root, commit)


@cache
def _former_names(root: Path, commit: str) -> dict[str, str]:
    """Return the former name, at a commit, of each file that has moved since."""
    lines = git(root, "diff", "--name-status", "--diff-filter=R", "-M40%", "-l0", commit, "--", "*.py").splitlines()
    return {new: old for _, old, new in (line.split("\t") for line in lines)}


def lines() -> Iterator[str]:
    """Yield a line for each result whose benchmark has changed, or whose commit is unknown."""
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
        if origin.file.name == "planted.json" and (untried := _untried(origin.file)):
            yield f"{name}: {untried} errors have changed or are new since they were tried"


def _untried(file: Path) -> int:
    """Return the number of planted errors that have no result."""
    sys.path.insert(0, str(ROOT / "tests"))
    errors = importlib.import_module("planted.catalogue").ERRORS
    tried = {row["fingerprint"] for row in json.loads(file.read_text())["errors"]}
    return sum(error.fingerprint not in tried for error in errors)


if __name__ == "__main__":
    print("\n".join(lines()) or "every result is as old as its benchmark")
    sys.exit(0)
