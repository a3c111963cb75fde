"""Base class of strategies: the part of an algorithm that runs in one optimizer on one rank.

`DistributedOptimizer` calls this class, or directly its `reducer` where only gradients matter. Every method except
`step` has a default, so an algorithm overrides only what it adds. A strategy that changes parameters outside the
optimizer's step derives from `sordino.algorithms.exchanging.ExchangingStrategy`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from sordino.algorithms.base import Algorithm
from sordino.algorithms.traffic import Sent
from sordino.errors import NoSuchAttribute, UsageError
from sordino.runtime.collectives.operation import Adasum
from sordino.runtime.context import Context
from sordino.runtime.exchange.saved_residuals import drop
from sordino.runtime.gradients.reducer import GradientReducer
from sordino.runtime.gradients.settings import Settings
from sordino.runtime.local_shards import clip_grad_norm
from sordino.runtime.process_set import ProcessSet
from sordino.runtime.tensors import match_memory_formats

Named = Sequence[tuple[str, torch.Tensor]]
Closure = Callable[[], Any] | None
_NOTHING: Mapping[str, Mapping[str, Any]] = {}


@dataclass(frozen=True)
class Runtime:
    """Inputs of a strategy.

    Attributes:
        context: the context of this rank.
        optimizer: the wrapped optimizer, which takes the steps.
        names: names of the parameters, the same on all ranks.
        parameters: parameters that the optimizer steps. A strategy may move them into shared memory.
        buffers: floating-point buffers that are averaged along with the parameters.
        settings: settings of the gradient reduction. Its process set contains all workers.
        compare: whether to meet the other ranks now (collective) or only at the first step. A copy of an optimizer
            must not meet at once, because it may exist on one rank only and never be used.
    """

    context: Context
    optimizer: torch.optim.Optimizer
    names: Sequence[str]
    parameters: Sequence[torch.Tensor]
    buffers: Named
    settings: Settings
    compare: bool

    @property
    def adasum(self) -> bool:
        """Whether ranks combine the changes made by their steps with Adasum."""
        return self.settings.op == Adasum and self.context.size > 1


def only_a_part(algorithm: Algorithm) -> UsageError:
    """Return the error for copying an optimizer if this rank has only a part of its state."""
    return UsageError(f"with {algorithm} a rank has only a part of the state; copy its state_dict() instead")


class Strategy(ABC):
    """Base class of strategies. One strategy runs an algorithm in one optimizer on one rank.

    Attributes:
        algorithm: the algorithm, adapted to the current ranks.
        reducer: reducer of gradients; None if no gradients are reduced before the step.
        steps_always: whether other ranks rely on every step of this rank, including a step that is skipped because
            gradients are infinite.
        partial_state: whether a rank holds only a part of the optimizer's state.
        distances: pairs of a step and the distance of the local models from their mean after it.
        parts: description of the parts of the model, such as "18 segments"; "" if the model is not divided.
        stepping: context manager within which the wrapped optimizer may step outside of `step`.
    """

    stepping: Callable[[], AbstractContextManager[None]] = nullcontext
    reducer: GradientReducer | None = None
    steps_always = False
    partial_state = False
    parts = ""

    def __init__(self, runtime: Runtime, algorithm: Algorithm) -> None:
        self.context, self.settings = runtime.context, runtime.settings
        self.names, self.parameters = list(runtime.names), list(runtime.parameters)
        self.algorithm = algorithm
        self.distances: list[tuple[int, float]] = []
        self._residuals: dict[str, Any] = {}  # loaded residuals, until there is a reducer

    # ---- gradients ---------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> bool:
        """Whether gradients are being reduced."""
        return self.reducer is not None and self.reducer.in_flight

    @property
    def done(self) -> bool:
        """Whether this step's gradients are reduced already."""
        return self.reducer is not None and self.reducer.done

    @property
    def ready(self) -> bool:
        """Whether backward has produced all gradients that are expected, and they are not reduced yet."""
        return self.reducer is not None and self.reducer.ready

    @property
    def final(self) -> bool:
        """Whether the gradients have the values that `step()` will use."""
        return self.reducer is None or self.reducer.final

    @property
    def accumulates(self) -> bool:
        """Whether backward passes only add to gradients, without starting their reduction."""
        return self.reducer is not None and self.reducer.accumulates

    @accumulates.setter
    def accumulates(self, accumulates: bool) -> None:
        if self.reducer is not None:
            self.reducer.accumulates = accumulates

    def synchronize(self) -> None:
        """Reduce all gradients, and wait for the result. Collective."""
        if self.reducer is not None:
            self.reducer.synchronize()

    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
        """Scale the gradients that `step()` will use so that their norm is at most `max_norm`. Collective.

        Returns:
            the norm before scaling.
        """
        if self.reducer is not None:
            return self.reducer.clip(max_norm, norm_type, error_if_nonfinite)
        return clip_grad_norm(self.parameters, max_norm, norm_type, error_if_nonfinite)

    def reset(self) -> None:
        """Begin a new cycle. The gradients of this cycle have been used or replaced."""
        if self.reducer is not None:
            self.reducer.reset()

    # ---- steps -------------------------------------------------------------------------------------------------

    @abstractmethod
    def step(self, optimizer: torch.optim.Optimizer, closure: Closure, synchronize: bool) -> Any:
        """Step the optimizer, with the communication of the algorithm before and after the step.

        Args:
            optimizer: the optimizer that takes the step.
            closure: closure as in `torch.optim.Optimizer.step`; None if there is no closure.
            synchronize: whether to reduce, before the step, all gradients that are not reduced yet.
        """

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Prepare a step. Also called before a step that will be skipped."""

    def step_begun(self, optimizer: torch.optim.Optimizer, closure: Closure, synchronize: bool) -> Any:
        """Step the optimizer after `begin`."""
        return self.step(optimizer, closure, synchronize)

    def leave_out(self) -> None:
        """Count a step that is skipped because gradients are infinite."""
        self.reset()

    def complete(self) -> None:
        """Take a step that was postponed, if there is one."""

    def drain(self, optimizer: torch.optim.Optimizer) -> None:
        """Apply everything that is still in flight. Collective."""

    def settle(self, optimizer: torch.optim.Optimizer) -> None:
        """Leave parameters and optimizer in a state from which another strategy can continue. Collective."""

    def prepare_growth(self, optimizer: torch.optim.Optimizer) -> None:
        """Settle, so that a new rank can start from any rank's parameters. Collective over the present ranks."""
        self.settle(optimizer)

    def detach(self) -> None:
        """Release the parameters, so that another strategy can use them. They stay where they are in memory."""
        if self.reducer is not None:
            self.reducer.release()

    def take_over(self, old: Strategy) -> None:
        """Continue from a strategy that has settled. It may have had other parameters."""

    def follow(self, has_changed: Callable[[], bool]) -> None:
        """Send `has_changed()`, whether the optimizer's parameters have changed, along with each reduction."""

    def before_change(self) -> None:
        """Reduce all gradients, before another strategy takes over in the middle of a step. Collective.

        Called if the optimizer's parameters have changed since it was wrapped.

        Raises:
            UsageError: the algorithm cannot adopt new parameters in the middle of a step.
        """
        raise UsageError(
            f"the wrapped optimizer has other parameters than when it was wrapped, and {self.algorithm.label} cannot "
            "adopt them in the middle of a step. Add them by add_param_group() of the DistributedOptimizer, or wrap a "
            "new optimizer"
        )

    def after_change(self, names: Sequence[str], added: Sequence[torch.Tensor]) -> None:
        """Continue a step for which another strategy has reduced all gradients but those of `added`. Collective.

        Args:
            names: names of the new parameters.
            added: the new parameters, whose gradients are not reduced yet.
        """

    def do_together(self, work: Callable[[], None]) -> None:
        """Call `work()`, which is collective."""
        work()

    def ranks_of_model(self) -> ProcessSet | None:
        """Return the ranks that share one model, because they average their gradients; None: each rank has its own.

        Collective the first time.
        """
        return self.settings.process_set

    # ---- state -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state of the algorithm for `DistributedOptimizer.state_dict()`; None: no state."""
        return None

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise UsageError for a state of another algorithm."""

    def go_on_from(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint, which all ranks load."""

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the optimizer's state dict for whole parameters, even if this rank steps only slices of them."""
        return optimizer.state_dict()

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Load a state dict for whole parameters."""
        optimizer.load_state_dict(state)
        match_memory_formats(optimizer)

    def residuals(self) -> dict[str, Any] | None:
        """Return this rank's residuals of encoded gradients, for checkpoints; {} before the first encoding.

        None: gradients have no codec, or a codec without error feedback.
        """
        if self.settings.codec is None or not self.settings.codec.feedback:
            return None
        return self._residuals if self.reducer is None else self.reducer.residuals()

    def load_residuals(self, state: dict[str, Any]) -> None:
        """Continue from a result of `residuals()`; {} sets the residuals to 0. Not collective.

        Raises:
            UsageError: `state` is not a result of `residuals()`.
        """
        if self.settings.codec is None or not self.settings.codec.feedback:
            drop(state, "gradients", "this optimizer sends gradients without error feedback")
        elif self.reducer is None:
            self._residuals = state
        else:
            self.reducer.load_residuals(state)

    def state_of_copies(self) -> dict[str, Any] | None:
        """Return the state from which a copy of the optimizer continues; None: it has no state. Not collective.

        Raises:
            UsageError: this rank has only a part of the state.
        """
        return self.state_dict()

    def outer_parameters(self) -> AbstractContextManager[None]:
        """Return a context manager within which the model has the outer parameters.

        Raises:
            UsageError: the algorithm is neither DiLoCo nor NoLoCo.
        """
        raise UsageError(f"outer_parameters() needs DiLoCo or NoLoCo; {self.algorithm.label} has no outer parameters")

    # ---- what users may ask ------------------------------------------------------------------------------------

    @property
    def statistics(self) -> Any:
        """Statistics of the algorithm's steps. Raises NoSuchAttribute if the algorithm keeps no statistics."""
        raise NoSuchAttribute(f"{self.algorithm} keeps no statistics")

    def noted(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the events since the last call that belong in the run record.

        Returns:
            the values of each line, by the kind of the line (docs/report.md).
        """
        return _NOTHING

    def report_metric(self, metric: float, rate: float | None) -> None:
        """Pass a metric of the training to the algorithm. Collective.

        Args:
            metric: the value on this rank, such as a loss.
            rate: the learning rate of the first parameter group, or None if it has none.

        Raises:
            UsageError: the algorithm does not use a metric.
        """
        raise UsageError(f"report_metric() has no effect with {self.algorithm}")

    @property
    def sent(self) -> Sent | None:
        """Flags of the items that the last step has sent (`traffic.Phase`); None: the algorithm skips none."""
        return None

    def scaler_problem(self) -> str | None:
        """Return why GradScaler cannot be used now; None if it can."""
        return None

    def skip_problem(self) -> str | None:
        """Return why `skip_synchronize()` cannot be used; None if it can."""
        return None
