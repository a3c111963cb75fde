"""Process groups of torch.distributed's backend "sordino": their ends and time limits (group_worker.py)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from distributed_jobs import assert_well, run
from pace import bound, stretched
from ports import free_ports

WORKER = Path(__file__).parent / "group_worker.py"


@pytest.mark.drill("groups of torch.distributed")
@pytest.mark.parametrize("size", [2, 3])
def test_groups(size: int, tmp_path: Path) -> None:
    """Torch's debug checks are on, which this backend does not need: its ranks always compare their operations.

    The timeout of a group ends its operations, not SORDINO_TIMEOUT_S, which is 60 s here.
    """
    soon = stretched(0.5)
    told = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "SORDINO_TEST_SOON_S": str(soon)}
    outputs = run("groups", size, tmp_path, str(free_ports()), worker=WORKER, **told)
    assert_well(outputs)
    for output in outputs:
        took = float(re.search(r"took (\S+)", output)[1])
        assert took < bound(0.5, certain_s=soon), output


@pytest.mark.soak
@pytest.mark.parametrize("part", ["missing", *(["combined"] if torch.__version__ >= (2, 14) else [])])
def test_other_groups(part: str, tmp_path: Path) -> None:
    assert_well(run(part, 3 if part == "combined" else 2, tmp_path, str(free_ports()), worker=WORKER))
