"""The checks again with every tensor in the memory of a GPU that is a thread. So the handling of devices in the core,
and of their tensors in Python, is tested without a GPU: on one node, with every rank on its own node, and in
between."""

from __future__ import annotations

import pytest
from checks.registry import Check, compare
from checks.worlds import DEVICES, World, all_pairs
from pretended import devices

from sordino import sim

CASES = [pytest.param(world, check, id=f"{world}-{check.name}") for world, check in all_pairs(DEVICES)]


@pytest.mark.parametrize(("world", "check"), CASES)
def test_on_pretended_devices(world: World, check: Check, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = devices(world.kind, world.ranks, monkeypatch)
    options = {"ranks_per_node": world.per_node, "algorithm": check.algorithm(world.ranks), "devices": gpus}
    compare(sim.run(world.ranks, check.run, "sim", str(tmp_path), **options))
