"""A short run of the benchmark of single copies by the kernel."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from results import ResultsOf

BENCHMARK = Path(__file__).resolve().parents[3] / "benchmarks" / "single_copy.py"


@pytest.mark.run_of_a_benchmark
def test_both_ways_bring_the_same_bytes(tmp_path: Path, results_of: ResultsOf) -> None:
    words = ["--quick", "--sizes", "1KiB,1MiB", "--results", str(tmp_path)]
    done = subprocess.run([sys.executable, str(BENCHMARK), *words], capture_output=True, text=True)
    if "Operation not permitted" in done.stderr:
        pytest.skip("needs process_vm_readv, which this container forbids")
    assert done.returncode == 0, done.stderr
    rows = results_of("single_copy")["rows"]
    assert [row["bytes"] for row in rows] == [1024, 1024 * 1024]
    assert all(set(row["contestants"]) == {"kernel", "slots"} for row in rows)
    assert "Single copies by the kernel" in done.stdout
