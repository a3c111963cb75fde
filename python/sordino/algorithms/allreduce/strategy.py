"""Strategy for synchronous all-reduce: averages gradients during backward, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from sordino.algorithms.allreduce import AllReduce
from sordino.algorithms.strategy import Closure, Runtime, Strategy
from sordino.runtime.gradients.reducer import GradientReducer


class AllReduceStrategy(Strategy):
    """Strategy for `AllReduce` without double buffering."""

    reducer: GradientReducer

    def __init__(self, runtime: Runtime, algorithm: AllReduce) -> None:
        super().__init__(runtime, algorithm)
        self.reducer = GradientReducer(self.context, self.names, self.parameters, self.settings, runtime.compare)

    def follow(self, has_changed: Callable[[], bool]) -> None:
        self.reducer.has_changed = has_changed

    def before_change(self) -> None:
        self.reducer.require_change_sent()
        self.reducer.synchronize()

    def after_change(self, names: Sequence[str], added: Sequence[torch.Tensor]) -> None:
        settings = replace(self.settings, groups=(), passes=1, finite=None)
        reducer = GradientReducer(self.context, names, added, settings, compare=False)
        reducer.synchronize()
        reducer.release()
        if self.settings.finite is not None:
            self.settings.finite.judge_gradients()
        self.reducer.take_as_reduced()

    def step(self, optimizer: torch.optim.Optimizer, closure: Closure, synchronize: bool) -> Any:
        return self.reducer.step(optimizer, closure, synchronize)
