"""A short run of the benchmark of cache lines that a peer has read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from results import ResultsOf

BENCHMARK = Path(__file__).resolve().parents[3] / "benchmarks" / "cache_lines.py"


@pytest.mark.run_of_a_benchmark
def test_both_kinds_of_stores_are_timed(tmp_path: Path, results_of: ResultsOf) -> None:
    words = ["--quick", "--messages", "16KiB,64KiB", "--rings", "64KiB,256KiB", "--results", str(tmp_path)]
    done = subprocess.run([sys.executable, str(BENCHMARK), *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = results_of("cache_lines")["rows"]
    assert rows, "no turn began and ended at the same place"
    assert {row["place"] for row in rows} <= {"near", "far"}
    assert all(row["write"] > 0 and row["read"] > 0 and row["bytes"] <= row["ring"] for row in rows)
    assert "Cache lines that a peer has read" in done.stdout
