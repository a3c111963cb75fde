"""Every check on ranks as threads: worlds of 1 to 5 ranks, on one node and on several."""

from __future__ import annotations

import os
import warnings

import pytest
from checks.registry import Check, compare
from checks.worlds import SIM, World
from selection import pairs_of

from sordino import sim


@pytest.fixture(autouse=True)
def deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a hanging check fail by itself, with the name of the operation, as threads cannot be killed."""
    monkeypatch.setenv("SORDINO_TIMEOUT_S", os.environ.get("SORDINO_TIMEOUT_S", "60"))


@pytest.mark.parametrize(("world", "check"), pairs_of(SIM))
def test_on_threads(world: World, check: Check, tmp_path) -> None:
    options = {"ranks_per_node": world.per_node, "algorithm": check.algorithm(world.ranks)}
    filters = list(warnings.filters)
    compare(sim.run(world.ranks, check.run, "sim", str(tmp_path), **options))
    assert warnings.filters == filters, "a check on threads has changed the filters of warnings (Seat.no_warnings)"
