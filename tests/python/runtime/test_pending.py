"""Handles of asynchronous operations after `shutdown()` and another `init()`."""

from __future__ import annotations

import pytest
import torch

import sordino.torch as hvd
from sordino import sim
from sordino.errors import UsageError


def test_a_handle_from_before_a_shutdown_is_no_handle_of_the_next_world() -> None:
    """It must not be taken for the handle of another operation, whose result synchronize() would return."""
    (old,) = sim.run(1, lambda: hvd.allreduce_async(torch.ones(2)))

    def go_on() -> None:
        for _ in range(3):
            handles = [hvd.allreduce_async(torch.full((3,), float(number))) for number in range(2)]
            assert old not in handles
            with pytest.raises(UsageError, match=f"synchronize\\({old}\\)"):
                hvd.synchronize(old)
            with pytest.raises(UsageError, match=f"Handle {old} was not created"):
                hvd.poll(old)
            assert [hvd.synchronize(handle).tolist() for handle in handles] == [[0.0] * 3, [1.0] * 3]

    sim.run(1, go_on)
