"""The checks again with every tensor in the memory of a GPU that is a thread: what is said of devices in the core, and
of their tensors in Python, holds where there is no GPU to try it on. One node, every rank a node, and in between.
"""

from __future__ import annotations

import pytest
from checks.registry import Check, all_checks, compare
from pretended import devices

from sordino import sim

WORLDS = [
    ("direct", 2, 0),
    ("direct", 3, 1),
    ("staged", 5, 2),
    ("nccl", 4, 0),
]  # averages of four are exact by NCCL, too
CASES = [
    pytest.param(check, kind, size, per_node, id=f"{check.name}-{kind}-{size}" + (f"x{per_node}" if per_node else ""))
    for check in all_checks().values()
    for kind, size, per_node in WORLDS
    # Helpers have no GPU. Two ranks on one GPU run all checks.
    if check.serves("sim", size)
    and (kind != "nccl" or check.helpers == "")
    and (check.moves_bytes or (kind == "direct" and size == 2))
]


@pytest.mark.parametrize(("check", "kind", "size", "per_node"), CASES)
def test_on_pretended_devices(
    check: Check, kind: str, size: int, per_node: int, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = devices(kind, size, monkeypatch)
    options = {"ranks_per_node": per_node, "algorithm": check.algorithm(size), "devices": gpus}
    compare(sim.run(size, check.run, "sim", str(tmp_path), **options))
