"""Processes whose models are on a GPU join a running job."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "faults"))

from growing import run_job
from growing_worker import Plan

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("algorithm", ("allreduce", "crossover"))
def test_a_lost_rank_is_replaced(tmp_path: Path, algorithm: str) -> None:
    """The mean of the models stays what it was, and the newcomer starts from it."""
    grown = run_job(tmp_path, 3, Plan(algorithm, kill={"1": 3}, size=3, device="cuda", meeting_s=30.0), 1)
    assert grown.ended.status == 0, grown.output
    assert list(grown.parameters("end")) == [0, 2, 3], grown.output
    before, after = grown.parameters("before"), grown.parameters("after")
    mean = np.mean([before[0], before[2]], axis=0)
    for rank in (0, 2, 3):
        np.testing.assert_allclose(after[rank], mean, rtol=1e-12, err_msg=f"rank {rank}")
    if algorithm == "allreduce":
        assert len({tuple(one) for one in grown.parameters("end").values()}) == 1
