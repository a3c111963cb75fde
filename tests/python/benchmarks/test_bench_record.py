"""A short run of the benchmark of the cost of recording."""

from __future__ import annotations

from pathlib import Path

import pytest
from checks.commands import launch

from results import ResultsOf

BENCHMARK = Path(__file__).resolve().parents[3] / "benchmarks" / "record.py"


@pytest.mark.run_of_a_benchmark
def test_writing_is_timed_in_turns(tmp_path: Path, results_of: ResultsOf) -> None:
    done = launch("run", "-np", "2", "--", "python", str(BENCHMARK), "--quick", "--results", str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = results_of("record")
    assert set(found["contestants"]) == {"none", "lines", "spans"} and found["turns"] >= 1
    assert found["writing"]["lines"]["count"] == found["turns"] * found["steps"] and 100 < found["bytes"] < 300
    assert "What a record costs" in done.stdout
