"""The version is the same wherever it is written, and a place that was forgotten is found."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = ("python/sordino/VERSION", "CHANGELOG.md", "CITATION.cff")
sys.path.insert(0, str(ROOT / "tools"))

import release  # noqa: E402


def test_the_version_is_the_same_everywhere() -> None:
    assert release.differences() == []


@pytest.mark.parametrize("forgotten", FILES[1:])
def test_a_forgotten_place_is_found(forgotten: str, tmp_path: Path) -> None:
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    path = tmp_path / forgotten
    path.write_text(path.read_text().replace(release.version(), "9.9.9"))
    (wrong,) = release.differences(tmp_path)
    assert wrong == f"{forgotten} has 9.9.9, python/sordino/VERSION has {release.version()}"
