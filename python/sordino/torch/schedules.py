"""Learning rates for many workers: scaling of the rate for one worker, and warm-up to the scaled rate."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from sordino.errors import UsageError

_RULES: dict[str, Callable[[int], float]] = {
    "linear": float,
    "sqrt": math.sqrt,
    "none": lambda workers: 1.0,
}


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def scale_learning_rate(lr: float, workers: int, rule: str = "linear") -> float:
    """Return the learning rate for `workers` times the batch that `lr` was tuned for.

    Args:
        lr: the learning rate for one worker, at least 0.
        workers: N, usually `size()`, times `backward_passes_per_step` if that is used.
        rule: "linear", N * lr (Goyal et al. 2017, arXiv:1706.02677, section 2.1): for averaged gradients and SGD;
            "sqrt", sqrt(N) * lr (Krizhevsky 2014, arXiv:1404.5997, section 5): keeps the variance of a step;
            "none", lr: for summed gradients, or for Adasum, which needs no scaling.

    Raises:
        UsageError: an argument is out of its range. The message names it.
    """
    if not _is_number(lr) or lr < 0:
        raise UsageError(f"scale_learning_rate(lr={lr!r}): must be a number at least 0")
    if not _is_count(workers, 1):
        raise UsageError(f"scale_learning_rate(workers={workers!r}): must be an integer at least 1")
    if rule not in _RULES:
        raise UsageError(f"scale_learning_rate(rule={rule!r}): must be one of {', '.join(_RULES)}")
    return lr * _RULES[rule](workers)


class GradualWarmup(LRScheduler):
    """Scheduler that raises all learning rates linearly, then continues with another scheduler.

    Let B be the rate of a group when this is made, and W = `warmup_steps`. After t calls of `step()`, for t <= W, the
    rate is B * (start_factor + (1 - start_factor) * t / W). From then on it is the rate of `after` after t - W steps,
    or B without `after`. For N workers and the linear rule this is the ramp from lr to N * lr of Goyal et al. 2017
    (section 2.2, gradual warm-up)::

        scaled = scale_learning_rate(lr, hvd.size())
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=scaled), ...)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps - warmup_steps)
        scheduler = GradualWarmup(optimizer, warmup_steps, start_factor=lr / scaled, after=cosine)

    It is not `SequentialLR([LinearLR, after])`, because that ends at the wrong rate with some schedulers of torch 2.13:
    MultiplicativeLR is a factor off, SequentialLR and ChainedScheduler raise NotImplementedError at the transition
    (pytorch#196243 is related). Here `after` is not used before its time.

    Args:
        optimizer: any optimizer, also `DistributedOptimizer`.
        warmup_steps: W, a number of calls of `step()`, at least 0. In the paper five epochs, with a step per iteration.
        start_factor: initial rate as a fraction of B, in [0, 1]; 1/N for the linear rule.
        after: a new scheduler of the same optimizer, made before this one. Not ReduceLROnPlateau, whose steps need a
            metric: step that one yourself after the warm-up.

    Attributes:
        base_rates: B of each group.
        after: the given scheduler, or None.

    Raises:
        UsageError: an argument is out of its range, or `after` belongs to another optimizer or has made steps.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_steps: int,
        start_factor: float,
        after: LRScheduler | None = None,
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(f"GradualWarmup(optimizer=...): must be an optimizer, not a {type(optimizer).__name__}")
        if not _is_count(warmup_steps, 0):
            raise UsageError(f"GradualWarmup(warmup_steps={warmup_steps!r}): must be an integer at least 0")
        if not _is_number(start_factor) or not 0 <= start_factor <= 1:
            raise UsageError(f"GradualWarmup(start_factor={start_factor!r}): must be a number between 0 and 1")
        if after is not None:
            _check_after(after, optimizer)
        self.warmup_steps = warmup_steps
        self.start_factor = start_factor
        self.after = after
        # Rates with which `after` starts, because making it has set them. So any scheduler can follow.
        self.base_rates = [float(group["lr"]) for group in optimizer.param_groups]
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the rates of the ramp, one per group. `step()` calls it during the warm-up."""
        done = min(self.last_epoch / self.warmup_steps, 1.0) if self.warmup_steps > 0 else 1.0
        factor = self.start_factor + (1 - self.start_factor) * done  # exact at both ends of the ramp
        return [rate * factor for rate in self.base_rates]

    def step(self) -> None:  # type: ignore[override]
        """Set the next learning rates. Call it after `optimizer.step()`."""
        if self.after is None or self.last_epoch < self.warmup_steps:
            super().step()
            return
        self.after.step()
        self.last_epoch += 1
        self._last_lr = self.after.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """Return everything except the optimizer. `after` is included by its own state."""
        return {**super().state_dict(), "after": None if self.after is None else self.after.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state: this scheduler, `after`, and the optimizer's learning rates.

        Raises:
            UsageError: only one of the state and this scheduler has an `after`, or the number of groups differs.
        """
        after = state_dict["after"]
        if (after is None) != (self.after is None):
            has = "no scheduler" if after is None else "a scheduler"
            raise UsageError(f"GradualWarmup.load_state_dict: the state has {has} after the warm-up, unlike this one")
        if len(state_dict["base_rates"]) != len(self.base_rates):
            raise UsageError(
                f"GradualWarmup.load_state_dict: the state has {len(state_dict['base_rates'])} parameter groups, but "
                f"the optimizer has {len(self.base_rates)}"
            )
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "after"})
        if self.after is not None:
            self.after.load_state_dict(after)
        # Many schedulers compute a rate from the previous one, which making this one has overwritten. Without this, the
        # result would depend on whether the optimizer's state is loaded before or after.
        for group, rate in zip(self.optimizer.param_groups, self._last_lr):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


def _check_after(after: Any, optimizer: torch.optim.Optimizer) -> None:
    """Raise UsageError unless `after` is a scheduler of `optimizer` at its step 0 that steps without arguments."""
    if not isinstance(after, LRScheduler) or isinstance(after, ReduceLROnPlateau):
        name = type(after).__name__
        raise UsageError(f"GradualWarmup(after=...): must be a scheduler that steps without a metric, not a {name}")
    if after.optimizer is not optimizer:
        raise UsageError(
            "GradualWarmup(after=...): belongs to another optimizer; create both for the same one (the "
            "DistributedOptimizer, if any)"
        )
    # A ChainedScheduler has no last_epoch.
    if getattr(after, "last_epoch", 0) != 0:
        raise UsageError(f"GradualWarmup(after=...): has made {after.last_epoch} steps; to resume use load_state_dict")
