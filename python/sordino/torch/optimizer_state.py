"""State of a `DistributedOptimizer` in checkpoints.

It is the wrapped optimizer's state. The key "sordino" is added if the algorithm has a state or gradients have
residuals: the algorithm's state, with its name under "algorithm", and the residuals of this rank.
"""

from __future__ import annotations

from typing import Any

import torch

from sordino.algorithms.strategy import Strategy
from sordino.errors import UsageError
from sordino.torch import dcp

_RESIDUALS = "gradient_residuals"
"""Key of residuals of encoded gradients, in the state under "sordino"."""


def state_of(strategy: Strategy, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state of a wrapped optimizer. Collective if each rank has a shard of it.

    Args:
        strategy: strategy of its steps.
        optimizer: the wrapped optimizer.
    """
    own, residuals = strategy.state_dict(), strategy.residuals()
    if own is None and residuals is None:
        return optimizer.state_dict()
    named = {"algorithm": strategy.algorithm.label, **(own or {})}
    if residuals is not None:  # also {}: torch's checkpoints load only the keys of the present state
        named[_RESIDUALS] = residuals
    return {**strategy.optimizer_state(optimizer), dcp.KEY: named}


def load_state(strategy: Strategy, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Continue from a state of `state_of()`, or of an optimizer that was not wrapped. No gradients may be in flight.

    Raises:
        UsageError: the state is of another algorithm. Nothing is loaded then.
    """
    inner, own = dcp.unpack(state)
    residuals: dict[str, Any] = {}
    if own is not None:
        own = _without_name(strategy, own)
        residuals = own.pop(_RESIDUALS, {})
        strategy.check_state(own)
    strategy.load_optimizer_state(optimizer, inner)
    strategy.reset()
    if own is not None:
        strategy.go_on_from(own)
    strategy.load_residuals(residuals)


def _without_name(strategy: Strategy, state: dict[str, Any]) -> dict[str, Any]:
    """Return the algorithm's state without its name. Raises UsageError if it is another algorithm's state."""
    algorithm, named = strategy.algorithm, state.get("algorithm", "another algorithm")
    foreign = "algorithm" in state and named not in (algorithm.label, *algorithm.former_labels)
    more = state.keys() - {"algorithm", _RESIDUALS}
    if foreign or (more and strategy.state_dict() is None):
        raise UsageError(
            f"this state was saved by {named}, but the optimizer uses {algorithm}. Use the same algorithm, or "
            f"remove the state of the other algorithm to begin {algorithm.label}: del state_dict['sordino']"
        )
    return {key: value for key, value in state.items() if key != "algorithm"}
