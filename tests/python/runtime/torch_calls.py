"""Calls of torch's functions in the source of the package."""

from __future__ import annotations

import ast
from collections.abc import Collection
from pathlib import Path

import sordino

_PACKAGE = Path(sordino.__file__).parent


def calls_without(keyword: str, functions: Collection[str], folder: str) -> list[str]:
    """Return the calls of these torch functions without the argument `keyword`, in a folder of the package."""
    found = []
    for path in sorted((_PACKAGE / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            by_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
            if by_torch and node.func.attr in functions and keyword not in {word.arg for word in node.keywords}:
                found.append(f"{path.relative_to(_PACKAGE)}:{node.lineno}: torch.{node.func.attr}(...)")
    return found
