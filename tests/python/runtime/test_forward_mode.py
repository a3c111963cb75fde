"""Forward-mode differentiation, which collectives refuse. On one rank, as torch has one dual level for all threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import sordino.torch as hvd
from sordino import sim
from sordino.errors import UsageError

CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "allreduce": hvd.allreduce,
    "grouped_allreduce": lambda x: hvd.grouped_allreduce([x]),
    "allgather": hvd.allgather,
    "broadcast": lambda x: hvd.broadcast(x, 0),
    "alltoall": hvd.alltoall,
    "reducescatter": hvd.reducescatter,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_forward_mode_is_refused(call: Callable[[torch.Tensor], Any]) -> None:
    def job() -> None:
        x = torch.arange(4.0)
        with forward_ad.dual_level():
            with pytest.raises(UsageError, match="forward mode"):
                call(forward_ad.make_dual(x, torch.ones_like(x)))
            call(x)  # without a tangent
        with pytest.raises(UsageError, match="forward mode"):
            torch.func.jvp(call, (x,), (x,))
        call(x)

    sim.run(1, job)
