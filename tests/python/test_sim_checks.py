"""Every check on ranks as threads: worlds of 1 to 5 ranks, on one node and cut into several."""

from __future__ import annotations

import os

import pytest
from checks.registry import Check, all_checks, compare

from sordino import sim

WORLDS = [(1, 0), (2, 0), (3, 0), (4, 0), (5, 0), (3, 1), (5, 2)]
CASES = [
    pytest.param(check, size, per_node, id=f"{check.name}-{size}" + (f"x{per_node}" if per_node else ""))
    for check in all_checks().values()
    for size, per_node in WORLDS
    if check.serves("sim", size)
]


@pytest.fixture(autouse=True)
def deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """What hangs fails by itself, with the name of the operation: threads cannot be killed."""
    monkeypatch.setenv("SORDINO_TIMEOUT_S", os.environ.get("SORDINO_TIMEOUT_S", "60"))


@pytest.mark.parametrize(("check", "size", "per_node"), CASES)
def test_on_threads(check: Check, size: int, per_node: int, tmp_path) -> None:
    compare(sim.run(size, check.run, "sim", str(tmp_path), ranks_per_node=per_node, algorithm=check.algorithm(size)))
