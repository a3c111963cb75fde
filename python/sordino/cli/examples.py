"""Copies an example with all files that it needs. Without a name, lists the examples.

  sordino examples                        # lists the examples
  sordino examples minimal                # writes minimal.py here
  sordino examples with-algorithm mine/   # writes mine/with_algorithm.py, and mine/minimal.py that it uses

Existing files are not overwritten.
"""

from __future__ import annotations

import argparse
import ast
import sys
from importlib.util import find_spec
from pathlib import Path

import sordino
from sordino.cli.checks import EXTRAS
from sordino.errors import UsageError
from sordino.files import atomic_file

_PACKAGE = Path(sordino.__file__).resolve().parent
# Folders of the examples in an installation, and in a clone whose package is used in place.
_PLACES = (_PACKAGE / "examples", _PACKAGE.parents[1] / "examples")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `sordino examples`."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="name of the example (default: list all)")
    parser.add_argument(
        "folder", nargs="?", type=Path, default=Path(), metavar="FOLDER", help="target folder (default: this one)"
    )


def main(options: argparse.Namespace) -> int:
    """List the examples, or copy one.

    Raises:
        UsageError: there is no such example, or a file to be written exists already, or cannot be written.
    """
    place = next((place for place in _PLACES if place.is_dir()), None)
    if place is None:
        raise UsageError(f"this installation has no examples in {_PLACES[0]}. Install Sordino again.")
    names = {path.stem.replace("_", "-"): path for path in sorted(place.glob("*.py"))}
    if options.name is None:
        width = max(map(len, names))
        for name, path in names.items():
            print(f"{name:{width}}  {_first_sentence(path)}")
        return 0
    chosen = names.get(options.name.removesuffix(".py").replace("_", "-"))
    if chosen is None:
        raise UsageError(f"there is no example {options.name!r}; use one of {', '.join(names)}")
    files = _with_all_it_imports(chosen, place)
    there = [str(options.folder / path.relative_to(place)) for path in files
             if (options.folder / path.relative_to(place)).exists()]  # fmt: skip
    if there:
        raise UsageError(f"{', '.join(there)}: exists already; give another folder, or move the file away")
    for path in files:
        target = options.folder / path.relative_to(place)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(target) as file:
                file.write(path.read_bytes())
        except OSError as error:
            raise UsageError(f"{target}: cannot be written: {error.strerror}") from error
        print(target)
    needed = {name.split(".")[0] for path in files for name in _imported(path)}
    if missing := sorted(needed & EXTRAS.keys() - {name for name in EXTRAS if find_spec(name)}):
        packages = " ".join(EXTRAS[module][0] for module in missing)
        print(f"It needs more packages: pip install {packages}", file=sys.stderr)
    print(f"Try: sordino run -np 4 -- python {options.folder / chosen.name}", file=sys.stderr)
    return 0


def _first_sentence(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return text.split("\n\n")[0].replace("\n", " ")


def _with_all_it_imports(chosen: Path, place: Path) -> list[Path]:
    """Return the files in `place` that a program there consists of, the program first."""
    found = [chosen]
    for path in found:
        for name in _imported(path):
            module = place.joinpath(*name.split("."))
            package = [parent / "__init__.py" for parent in (module, module.parent) if parent != place]
            for one in (*package, module.with_suffix(".py")):
                if one.is_file() and one not in found:
                    found.append(one)
    return found


def _imported(path: Path) -> set[str]:
    """Return the modules that a file may import: `from a import b` may mean a.b."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{one.name}" for one in node.names)
    return names
