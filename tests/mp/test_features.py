"""Other parts of torch with torch.distributed's backend "sordino" in jobs of two processes (features_worker.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
from distributed_jobs import assert_well, run

WORKER = Path(__file__).parent / "features_worker.py"


@pytest.mark.parametrize("part", ["compiled", "checkpoints", "complex_models"])
def test_other_parts_of_torch(part: str, tmp_path: Path) -> None:
    assert_well(run(part, 2, tmp_path, str(tmp_path / "saved"), worker=WORKER))
