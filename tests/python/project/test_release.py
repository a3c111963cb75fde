"""The version is the same in all files, a file that was forgotten is found, and wheels have size limits."""

from __future__ import annotations

import json
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FILES = ("python/sordino/VERSION", "CHANGELOG.md", "CITATION.cff")
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tools" / "wheels")]

import make  # noqa: E402
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


def test_what_wheels_take_is_noted_with_cuda_and_without(tmp_path: Path) -> None:
    noted = tmp_path / "sizes.json"
    for name, extra in (("a", {}), ("b", {"sordino/libsordino_cuda.so": 2_000_000})):
        with zipfile.ZipFile(tmp_path / name, "w") as wheel:
            for file, size in {"sordino/_core.cpython-311.so": 340_000, "sordino/a.py": 700_000, **extra}.items():
                wheel.writestr(file, bytes(size))
        make.note(make.sizes(tmp_path / name), noted)
    found = json.loads(noted.read_text())
    assert found["without CUDA"] == {"wheel": 1.0, "installed": 1.0, "_core": 0.3}
    assert found["with CUDA"] == {"wheel": 3.0, "installed": 3.0, "_core": 0.3, "libsordino_cuda": 2.0}
