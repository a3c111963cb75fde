"""torch's own tests of backends pass with "sordino", as outcomes.json says (survey.py writes it)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from own_job import OUTCOMES, Job
from pace import HANG_S

KNOWN = json.loads(OUTCOMES.read_text())
PASSED = [name for name, one in KNOWN["tests"].items() if one["outcome"] == "passed"]
# A handful for `make test`, each of another kind: they share one start of the ranks.
FEW = [
    "test_DistributedDataParallelCPU", "test_barrier_timeout_full_group", "test_get_future",
    "test_monitored_barrier_gloo_rank_0_timeout", "test_scatter_object_list", "test_sparse_all_reduce_sum",
]  # fmt: skip

pytestmark = pytest.mark.skipif(
    torch.__version__.partition("+")[0] != KNOWN["torch"], reason=f"the outcomes are those of PyTorch {KNOWN['torch']}"
)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    made = Job(KNOWN["ranks"], tmp_path_factory.mktemp("torch-own"))
    yield made
    made.end()


def test_a_few(tmp_path: Path) -> None:
    """On two ranks, to save time."""
    job = Job(2, tmp_path)
    try:
        for name in FEW:
            found = job.run(name)
            assert found["outcome"] == "passed", f"{name}: {found['reason']}"
    finally:
        job.end()


@pytest.mark.soak
@pytest.mark.parametrize("name", PASSED)
def test_passes(job: Job, name: str) -> None:
    found = job.run(name)
    assert found["outcome"] == "passed", found["reason"]


@pytest.mark.soak
def test_no_test_is_missing() -> None:
    words = [sys.executable, str(OUTCOMES.parent / "survey.py"), "--list"]
    found = json.loads(subprocess.run(words, capture_output=True, text=True, check=True, timeout=HANG_S).stdout)
    known = KNOWN["tests"]
    assert list(known) == list(found)
    assert {name: known[name]["reason"] for name in found if found[name]} == {n: why for n, why in found.items() if why}


def test_none_fails() -> None:
    assert [name for name, one in KNOWN["tests"].items() if one["outcome"] == "failed"] == []
