"""The table of required and measured speeds (benchmarks/ways/speed.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ways import speed


def entry(median: float, p99: float = 1.0) -> dict[str, Any]:
    return {"median": median, "p99": p99}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    here = {"hosts": 0, "ranks_per_host": 2, "mbps": 0.0}
    rows = [
        here | {"bytes": 4, "contestants": {"sordino_local": entry(1.4, 2.8), "mpi": entry(0.7)}},
        here
        | {
            "bytes": 64 * speed.MIB,
            "contestants": {
                "sordino_local": entry(2.0),
                "mpi": entry(9.0),
                "floor": entry(1.0),
                "ordinary": entry(3.0),
            },
        },
    ]
    files = {
        "transports_here": {"rows": rows},
        "gossip_exchange_np4": {
            "targets": [{"what": "Crossover by model: not slower than our all-reduce", "value": 0.8}]
        },
        "speed": {"simulate": {"command": "simulate", "seconds": 16.0, "mib": 595.0}},
    }
    for name, found in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"machine": {"date": "today"}} | found))
    return tmp_path


def test_rows_come_from_the_results(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert speed.main(["--keep", "--results", str(folder)]) == 1  # most results are not there
    rows = {row["what"]: row for row in json.loads((folder / "speed.json").read_text())["rows"]}

    def found(what: str) -> tuple[Any, Any]:
        return rows[what]["value"], rows[what]["met"]

    assert found("one machine, 4 B: over MPI_Allreduce") == (2.0, False)
    assert found("the same, 4 B: slowest of 100 over median") == (2.0, True)
    assert found("arena, 64 MiB: MPI_Allreduce over ours") == (4.5, True)
    assert found("arena, 64 MiB: over the floor") == (2.0, False)
    assert found("4 ranks on 2 cores: Crossover over our all-reduce") == (1.25, False)
    assert found("simulate, scheduled pull, 10^5 workers: seconds") == (16.0, True)
    assert found("one machine, 4 KiB: over MPI_Allreduce") == (None, None)
    said = capsys.readouterr()
    assert "not measured: one machine, 4 KiB" in said.err
    assert "## Why some are missed" in said.out
