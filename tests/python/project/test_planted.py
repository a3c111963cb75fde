"""The errors of tests/planted can still be planted, and the tests that must catch them exist."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from planted.catalogue import ERRORS
from planted.error import KINDS, Error

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.name)
def test_it_can_be_planted(error: Error) -> None:
    source = (ROOT / error.file).read_text()
    assert error.plant(source) != source
    assert error.kind in KINDS
    assert error.caught_by
    for command in error.caught_by:
        if command.startswith("cpp."):
            source = f"{command.removeprefix('cpp.')}.cc"
            assert any((ROOT / "tests" / folder / source).is_file() for folder in ("cpp", "cuda_on_cpu"))
        else:
            paths = [word for word in shlex.split(command) if word.startswith("tests/")]
            assert paths and all((ROOT / path).is_file() for path in paths)


def test_names_are_different_and_kinds_are_all_there() -> None:
    names = [error.name for error in ERRORS]
    assert len(set(names)) == len(names) >= 65
    assert {error.kind for error in ERRORS} == set(KINDS)
    with pytest.raises(ValueError, match=f"{names[0]}: .* has this 0 times"):
        ERRORS[0].plant("")
