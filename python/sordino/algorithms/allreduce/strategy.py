"""All-reduce in an optimizer: gradients are averaged in backward, and there is nothing else."""

from __future__ import annotations

from typing import Any

import torch

from sordino.algorithms.allreduce import AllReduce
from sordino.algorithms.strategy import Closure, Runtime, Strategy
from sordino.runtime.reducer import GradientReducer


class AllReduceStrategy(Strategy):
    """What makes the steps of an optimizer those of all-reduce."""

    reducer: GradientReducer

    def __init__(self, runtime: Runtime, algorithm: AllReduce) -> None:
        super().__init__(runtime, algorithm)
        self.reducer = GradientReducer(self.context, self.names, self.parameters, self.settings, runtime.compare)

    def step(self, optimizer: torch.optim.Optimizer, closure: Closure, synchronize: bool) -> Any:
        return self.reducer.step(optimizer, closure, synchronize)
