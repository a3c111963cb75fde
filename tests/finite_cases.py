"""Algorithms and optimizers for the tests of check_finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import sordino.torch as hvd
from sordino.algorithms import Algorithm
from sordino.errors import NonFinite


def wrap(
    parameters: dict[str, torch.Tensor], algorithm: Algorithm | None = None, lr: float = 0.5, **options: Any
) -> hvd.DistributedOptimizer:
    inner = torch.optim.SGD(parameters.values(), lr=lr)
    options = {"check_finite": True, **options}
    return hvd.DistributedOptimizer(inner, parameters.items(), algorithm=algorithm, **options)


def leaf(size: int = 5, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(size, dtype=dtype))


def refused(call: Callable[[], object]) -> NonFinite:
    with pytest.raises(NonFinite) as caught:
        call()
    return caught.value
