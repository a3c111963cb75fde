"""In CI a test that is skipped because something is missing fails; elsewhere it is skipped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest

@pytest.mark.skipif(True, reason="needs libfake_nccl.so")
def test_marked(): pass

def test_inside(): pytest.importorskip("no_such_module_at_all")

@pytest.fixture
def cluster(): pytest.skip("needs root")

def test_fixture(cluster): pass

@pytest.mark.xfail
def test_expected_to_fail(): assert False

@pytest.mark.gpu
@pytest.mark.skip(reason="no CUDA device")
def test_on_a_gpu(): pass

@pytest.mark.skipif(True, reason="a GPU is there")
def test_without_a_gpu(): pass
"""


@pytest.mark.parametrize("ci", [True, False], ids=["ci", "elsewhere"])
def test_what_is_missing_fails_in_ci_alone(tmp_path: Path, ci: bool) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "test_module.py").write_text("import pytest\npytest.importorskip('no_such_module_at_all')\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    environment = {name: value for name, value in os.environ.items() if name != "CI"} | ({"CI": "1"} if ci else {})
    environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
    words = [sys.executable, "-m", "pytest", "-p", "no_skips", "-p", "no:cacheprovider", "-rA", "--color=no"]
    done = subprocess.run(
        [*words, "--continue-on-collection-errors", str(tmp_path)], capture_output=True, text=True, env=environment
    )
    if not ci:
        assert done.returncode == 0 and "= 6 skipped, 1 xfailed in " in done.stdout, done.stdout
        return
    assert done.returncode == 1 and "= 1 failed, 2 skipped, 1 xfailed, 3 errors in " in done.stdout, done.stdout
    assert "test_module.py is skipped in CI, where everything is installed" in done.stdout
    for name in ("test_marked", "test_inside", "test_fixture"):
        assert f"test_it.py::{name} is skipped in CI, where everything is installed" in done.stdout
