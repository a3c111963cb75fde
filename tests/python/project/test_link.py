"""Symbols that the libraries of the build show to other libraries in a process."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

_TESTS = os.environ.get("SORDINO_CPP_TESTS", "")
TREE = Path(_TESTS).parents[1] if _TESTS else Path(__file__).resolve().parents[3] / "build" / "tree"


def test_a_static_standard_library_stays_hidden(tmp_path: Path) -> None:
    """Some compilers link libstdc++ statically. If that copy were visible, it would be mixed with PyTorch's."""
    ninja, nm = shutil.which("ninja"), shutil.which("nm")
    if ninja is None or nm is None or not (TREE / "build.ninja").exists():
        pytest.skip("needs build/tree of `make cpp-test`, ninja and nm")
    commands = subprocess.run(
        [ninja, "-C", str(TREE), "-t", "commands", "libsordino.so"], capture_output=True, text=True, check=True
    )
    link = commands.stdout.splitlines()[-1]
    linked = tmp_path / "libsordino.so"
    assert link.count("-o libsordino.so") == 1, link
    link = link.replace("-o libsordino.so", f"-static-libstdc++ -o {linked}")
    subprocess.run(link, shell=True, cwd=TREE, check=True)
    found = subprocess.run([nm, "-D", "--defined-only", str(linked)], capture_output=True, text=True, check=True)
    symbols = [line.split()[-1] for line in found.stdout.splitlines()]
    assert any("sordino" in one for one in symbols)
    assert [one for one in symbols if one.startswith("_ZNSt6locale")] == []
