"""Imports point down: the components of the package that each component may import, and no cycles of modules."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import pytest

import sordino
from sordino.cli.bench import BENCHMARKS, IN_A_CLONE

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ROOT / "python"

# Every component, lowest first, and the components that it may import; "" is `sordino` itself.
COMPONENTS = {
    "errors": "",
    "_core": "",
    "awake": "",
    "": "errors _core",
    "data": "errors",
    "files": "errors",
    "fingerprint": "errors",
    "pool": "",
    "progress": "",
    "literals": "",
    "suggestions": "",
    "codecs": "errors _core literals suggestions",
    "log": "_core",
    "rendezvous": "errors _core awake fingerprint log",
    "record": "errors files log",
    "report": "errors _core files record",
    "launcher": "errors _core awake log rendezvous",
    "runtime": "errors _core fingerprint log record",
    "inspection": "errors log runtime",
    "runtime.recovery": "errors _core log rendezvous runtime",
    "runtime.collectives": "errors _core runtime runtime.recovery",
    "runtime.exchange": "errors _core codecs log runtime runtime.collectives runtime.recovery",
    "runtime.gradients": "errors _core codecs fingerprint runtime runtime.collectives runtime.exchange "
    "runtime.recovery",
    "algorithms": "errors _core codecs files fingerprint literals suggestions report runtime runtime.*",
    "extend": "errors _core runtime runtime.* algorithms",
    "torch": "errors _core codecs suggestions log inspection rendezvous runtime runtime.* algorithms",
    "distributed": "errors _core awake codecs rendezvous runtime runtime.* torch",
    "integrations": "errors _core rendezvous algorithms torch",
    "sim": "_core log runtime runtime.* algorithms torch",
    "timing": "torch",
    "checkpoint": "errors files log runtime runtime.* torch",
    "plan": "errors _core codecs data record report runtime runtime.* algorithms torch timing",
    "simulate": "errors _core codecs data files pool progress suggestions record report runtime runtime.* algorithms "
    "torch sim checkpoint plan",
    "bench": "errors _core codecs report runtime runtime.* torch distributed timing",
    "cli": "errors awake _core files suggestions inspection rendezvous launcher record report runtime torch plan "
    "simulate",
}

# Remaining exceptions from the rules. These imports are to be removed, and no others may be added.
KNOWN = {
    # Horovod's module has all names of its package.
    ("sordino.torch.mpi_ops", "sordino.torch"),
}

Imports = dict[str, set[str]]
"""For each module the modules that it imports, also in functions."""


def modules(root: Path) -> dict[str, Path]:
    """Return the modules of a folder by name."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


NAMED = re.compile(r"(sordino(?:\.\w+)*):\w+")
"""A string with the name of a class or function that is imported when it is used."""


def statements(node: ast.AST, for_types: bool) -> Iterator[ast.Import | ast.ImportFrom | str]:
    """Yield all imports, with or without those for the type checker, and the modules that strings name."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        yield node
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and (match := NAMED.fullmatch(node.value)):
        yield match[1]
    types_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    for child in node.orelse if types_only and not for_types else ast.iter_child_nodes(node):
        yield from statements(child, for_types)


def ancestors(name: str) -> set[str]:
    """Return the packages that contain a module, and the module itself."""
    parts = name.split(".")
    return {".".join(parts[:count]) for count in range(1, len(parts) + 1)}


def read(found: dict[str, Path], for_types: bool = False) -> Imports:
    """Return the imports between these modules. Importing a module from outside its package also imports its packages.

    Strings that name classes count as imports, too. A folder may name its own modules: an algorithm names its strategy.
    """
    imports: Imports = {}
    for name, path in found.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        imports[name] = set()
        for node in statements(ast.parse(path.read_text()), for_types):
            if isinstance(node, str):
                inner = package.count(".") > 1 and node.startswith(f"{package}.")
                targets = [] if inner else [node]
            elif isinstance(node, ast.Import):
                targets = [one.name for one in node.names]
            else:
                base = resolve_name("." * node.level + (node.module or ""), package)
                inside = [f"{base}.{one.name}" for one in node.names]
                targets = [one if one in found else base for one in inside]
            for target in targets:
                imports[name] |= ({target} | ancestors(target) - ancestors(name)) & found.keys()
    return imports


@pytest.fixture(scope="module")
def package() -> dict[str, Path]:
    return modules(SOURCES) | {"sordino._core": SOURCES / "sordino" / "_core.pyi"}


@pytest.fixture(scope="module")
def imports(package: dict[str, Path]) -> Imports:
    return read(package)


def component(name: str) -> str:
    """Return the component of a module: a module or folder of `sordino`, or a folder of its runtime."""
    parts = name.split(".")[1:3]
    return ".".join(parts) if ".".join(parts) in COMPONENTS else "".join(parts[:1])


def below(place: str) -> set[str]:
    """Return the components that this one may import: itself, those of its line in the table, and `sordino` itself."""
    words = COMPONENTS[place].split()
    nested = {one for one in COMPONENTS for word in words if word.endswith(".*") and one.startswith(word[:-1])}
    return {place, "", *words} | nested


def upward(imports: Imports) -> set[tuple[str, str]]:
    """Return the imports that the table does not allow."""
    return {
        (name, target)
        for name, targets in imports.items()
        for target in targets
        if component(target) not in below(component(name))
    }


def circle(imports: Imports, but: set[tuple[str, str]]) -> list[str]:
    """Return a cycle of modules that needs none of the imports `but`; empty if there is no such cycle."""
    graph = {
        name: [target for target in targets if target != name and (name, target) not in but]
        for name, targets in imports.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_the_table_is_of_the_package_and_points_down() -> None:
    assert {component(name) for name in modules(SOURCES)} | {"_core"} == set(COMPONENTS)
    lower: set[str] = set()
    for name, allowed in COMPONENTS.items():
        assert below(name) - {name} <= lower | {""} | {word for word in allowed.split() if word.endswith(".*")}, name
        lower.add(name)


def test_imports_point_down(package: dict[str, Path]) -> None:
    """This includes imports for the type checker: a component does not even name components above it."""
    assert sorted(upward(read(package, for_types=True)) - KNOWN) == []


def test_no_module_needs_itself(imports: Imports) -> None:
    """This holds for imports at the top of a module, and for imports in functions."""
    assert circle(imports, KNOWN) == []


def test_what_is_known_is_still_there(imports: Imports) -> None:
    """A change that removes such an import must also remove it from the list."""
    assert sorted(one for one in KNOWN if one[1] not in imports[one[0]]) == []
    for one in KNOWN:
        assert one in upward(imports) or circle(imports, KNOWN - {one}) != [], one


def test_what_the_rules_are_for_is_found(tmp_path: Path) -> None:
    """Upward imports and cycles are found at the top level, in functions, with relative names and in strings."""
    package = tmp_path / "sordino"
    for folder in ("algorithms", "torch"):
        (package / folder).mkdir(parents=True)
        (package / folder / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "errors.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import sordino.torch\n"
    )
    (package / "algorithms" / "gossip.py").write_text("def f():\n    from sordino.torch import ops\n")
    (package / "algorithms" / "local.py").write_text('steps = "sordino.torch.tensors:f"\n')
    (package / "torch" / "ops.py").write_text("from .tensors import g\nimport sordino.algorithms.gossip\n")
    (package / "torch" / "tensors.py").write_text("try:\n    from . import ops\nexcept ImportError:\n    pass\n")
    found = read(modules(tmp_path))
    assert found["sordino.errors"] == set()
    assert ("sordino.errors", "sordino.torch") in upward(read(modules(tmp_path), for_types=True))
    assert found["sordino.torch.ops"] == {"sordino.torch.tensors", "sordino.algorithms", "sordino.algorithms.gossip"}
    below = {("sordino.algorithms.gossip", one) for one in ("sordino.torch", "sordino.torch.ops")}
    named = {("sordino.algorithms.local", one) for one in ("sordino.torch", "sordino.torch.tensors")}
    assert upward(found) == below | named
    assert set(circle(found, below)) == {"sordino.torch.ops", "sordino.torch.tensors"}
    assert set(circle(found, {("sordino.torch.tensors", "sordino.torch.ops")})) >= {"sordino.algorithms.gossip"}


# --- Content of the package -------------------------------------------------------------------------------------------


def test_the_package_measures_no_more_than_its_command_offers() -> None:
    """The package as it is installed, or the clone if that is tested."""
    place = Path(sordino.__file__).parent
    assert {path.stem for path in (place / "bench").glob("*.py")} == {
        *BENCHMARKS,
        *("__init__", "baselines", "command_line", "pictures", "report", "resnet", "tables"),
    }
    assert (place / "py.typed").is_file()
    names = {path.name for path in place.rglob("*")}
    assert not names & {"benchmarks", "claims", "cluster", "drills", "soak.py"}


def test_every_other_benchmark_is_a_script_that_the_command_names() -> None:
    scripts = {path.stem for path in (ROOT / "benchmarks").glob("*.py")}
    assert scripts == {*BENCHMARKS, *IN_A_CLONE, "report", "provenance"}
