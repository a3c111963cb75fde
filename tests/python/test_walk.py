"""What Python a steady step walks through stays as short as it is said to be."""

from __future__ import annotations

import pytest

import walk


@pytest.mark.parametrize("name", walk.WALKS)
def test_a_step_calls_few_functions_in_few_files(name: str) -> None:
    found = walk.walk(walk.WALKS[name])
    files = {file for file, _ in found}
    functions, most_files = walk.MOST[name]
    assert len(found) <= functions and len(files) <= most_files, "\n".join(f"{file}: {one}" for file, one in found)
    assert len(found) > functions / 2  # it has counted something
