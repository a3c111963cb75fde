"""`DistributedOptimizer` as frameworks call it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

import sordino.torch as hvd
from sordino.algorithms import Algorithm


class FrameworkOptimizer(hvd.DistributedOptimizer):
    """`DistributedOptimizer` that evaluates a closure before its step, not within it.

    Frameworks pass `step()` a closure of forward, backward and clipping. Evaluating it before the step is what a loop
    without closures does, so algorithms that communicate after the step, or that refuse closures, work as in such a
    loop. An optimizer that may evaluate a closure several times (LBFGS) gets it unchanged.
    """

    _collected: dict[str, Any] | None = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        if closure is None or not self._strategy.settings.evaluates_once:
            return super().step(closure)
        with torch.enable_grad():  # as the optimizer would
            loss = closure()
        super().step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() if self._collected is None else self._collected

    @contextmanager
    def collected_state(self) -> Iterator[None]:
        """Let `state_dict()` return the present state within the block, also on one rank alone. Entry is collective.

        For frameworks that call `state_dict()` on rank 0 only, although it may need the other ranks (`LocalSGD`).
        """
        self._collected = super().state_dict()
        try:
            yield
        finally:
            self._collected = None

    @property
    def models_differ(self) -> bool:
        """Whether ranks have different models between two exchanges."""
        return self._strategy.algorithm.models(hvd.size()) > 1

    @property
    def may_replace_model(self) -> bool:
        """Whether parameters may be replaced between two steps, and put back: no peer uses them meanwhile."""
        traits = self._strategy.algorithm.traits
        return traits.synchronous and not traits.late


def wrapped(
    optimizer: torch.optim.Optimizer, modules: Sequence[torch.nn.Module], algorithm: Algorithm, **options: Any
) -> FrameworkOptimizer:
    """Return the optimizer with an algorithm. Collective.

    Args:
        optimizer: the optimizer of a framework's user.
        modules: modules that have its parameters, and buffers for algorithms that average them.
        algorithm: the algorithm.
        **options: other arguments of `DistributedOptimizer`.

    Raises:
        UsageError, LayoutMismatch, ConfigurationMismatch, TypeError: as `DistributedOptimizer`.
    """
    if algorithm.traits.averages_buffers:
        options = {"named_buffers": list(_named(modules, "named_buffers")), **options}
    names = list(_named(modules, "named_parameters"))
    return FrameworkOptimizer(optimizer, named_parameters=names, algorithm=algorithm, **options)


def _named(modules: Sequence[torch.nn.Module], what: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of modules with their names, which begin with a module's number if there are several."""
    for number, module in enumerate(modules):
        prefix = f"{number}." if len(modules) > 1 else ""
        for name, tensor in getattr(module, what)():
            yield prefix + name, tensor


def broadcast(module: torch.nn.Module) -> None:
    """Copy the parameters and buffers of rank 0 to all ranks. Collective."""
    hvd.broadcast_parameters(module.state_dict(), root_rank=0)
