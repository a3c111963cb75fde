"""Python code may run within a call, and may communicate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks.reference import assert_equal
from torch.overrides import TorchFunctionMode

import sordino.torch as hvd
from sordino import sim


class _Nested(TorchFunctionMode):
    """Communicates whenever a call makes a tensor for its result, as the finalizer of an object might."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[torch.Tensor] = []

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.new_empty:
            self.results.append(hvd.allreduce(torch.ones(2), op=hvd.Sum, name="within"))
        return func(*args, **(kwargs or {}))


@pytest.mark.timeout(60)
def test_a_call_within_a_call() -> None:
    nested = _Nested()

    def on_the_rank() -> None:
        tensor = torch.ones(3)
        hvd.allgather(tensor, name="x")
        with nested:
            assert_equal(hvd.allgather(tensor, name="x"), tensor)

    sim.run(1, on_the_rank)
    assert [one.tolist() for one in nested.results] == [[1, 1]]
