"""What one optimizer on one rank does for its steps to be those of an algorithm, and what it is given for that.

`DistributedOptimizer` talks to this class alone. Every method but `step` has a default that does nothing, so an
algorithm writes down only what it adds; one that changes parameters beside the optimizer derives from
`sordino.algorithms.exchanging.ExchangingStrategy`.
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
from sordino.errors import NoSuchAttribute, StepOrderError, UsageError
from sordino.runtime.bucket import Settings
from sordino.runtime.context import Context
from sordino.runtime.operation import Adasum
from sordino.runtime.process_set import ProcessSet
from sordino.runtime.reducer import GradientReducer

Named = Sequence[tuple[str, torch.Tensor]]
Closure = Callable[[], Any] | None
_NOTHING: Mapping[str, Mapping[str, Any]] = {}


@dataclass(frozen=True)
class Runtime:
    """What a strategy is given.

    Attributes:
        context: this rank.
        optimizer: the one that takes the steps.
        names: of the parameters, the same on all ranks.
        parameters: that the optimizer steps. A strategy may move them into shared memory.
        buffers: floating-point buffers that are averaged along with them.
        settings: how gradients are reduced; its process set is that of all workers.
        compare: whether to meet the other ranks now (collective), or at the first step: a copy of an optimizer may be
            made on one rank only and never be used.
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
        """Whether ranks combine what their steps have changed, by Adasum."""
        return self.settings.op == Adasum and self.context.size > 1


class Strategy(ABC):
    """What makes the steps of an optimizer those of an algorithm.

    Attributes:
        algorithm: for the ranks that there are.
        reducer: of gradients, where some are reduced before the step.
        steps_always: whether others count on every step of this rank, also on one that is left out because gradients
            are infinite.
        partial_state: whether a rank has a part of the optimizer's state only.
        distances: steps, and how far the local models were from their mean after them.
        parts: how the model is cut, as "18 segments"; "" if there is nothing to say.
        stepping: a context in which the wrapped optimizer may step outside of `step`.
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
        """Whether gradients wait to be reduced."""
        return self.reducer is not None and self.reducer.ready

    @property
    def final(self) -> bool:
        """Whether gradients are those that `step()` will use."""
        return self.reducer is None or self.reducer.final

    @property
    def accumulates(self) -> bool:
        """Whether backward passes only add to gradients."""
        return self.reducer is not None and self.reducer.accumulates

    @accumulates.setter
    def accumulates(self, accumulates: bool) -> None:
        if self.reducer is not None:
            self.reducer.accumulates = accumulates

    def synchronize(self) -> None:
        """Wait until gradients are reduced. Collective."""
        if self.reducer is not None:
            self.reducer.synchronize()

    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
        """Scale the gradients that `step()` will use so that their norm is at most `max_norm`. Collective.

        Returns:
            the norm before.
        """
        if self.reducer is not None:
            return self.reducer.clip(max_norm, norm_type, error_if_nonfinite)
        return torch.nn.utils.clip_grad_norm_(self.parameters, max_norm, norm_type, error_if_nonfinite)

    def reset(self) -> None:
        """Begin a new cycle: this one's gradients have been used, or replaced."""
        if self.reducer is not None:
            self.reducer.reset()

    def clear(self, optimizer: torch.optim.Optimizer, set_to_none: bool) -> None:
        """Do what `zero_grad()` does. StepOrderError while gradients are being reduced."""
        reducer = self.reducer
        if reducer is not None and reducer.touched:
            if self.in_flight:
                reducer.require_whole("zero_grad()")
                raise StepOrderError(
                    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                    "optimizer.synchronize(). This is prohibited as it can cause a race condition."
                )
            reducer.reset()  # these gradients are not going to be used
        optimizer.zero_grad(set_to_none=set_to_none)

    # ---- steps -------------------------------------------------------------------------------------------------

    @abstractmethod
    def step(self, optimizer: torch.optim.Optimizer, closure: Closure, synchronize: bool) -> Any:
        """Step the optimizer, and do what belongs to it before and after.

        Args:
            optimizer: the one that takes the step.
            closure: as of `torch.optim.Optimizer.step`; None: there is none.
            synchronize: whether gradients that are not reduced yet are to be reduced first.
        """

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Do what precedes a step, also one that is going to be left out."""

    def step_begun(self, optimizer: torch.optim.Optimizer, closure: Closure, synchronize: bool) -> Any:
        """Step the optimizer after `begin`."""
        return self.step(optimizer, closure, synchronize)

    def leave_out(self) -> None:
        """Count a step that is left out because gradients are infinite."""
        self.reset()

    def complete(self) -> None:
        """Take a step that was put off."""

    def drain(self, optimizer: torch.optim.Optimizer) -> None:
        """Take in what is still under way. Collective."""

    def settle(self, optimizer: torch.optim.Optimizer) -> None:
        """Leave parameters and the optimizer so that another strategy can go on with them. Collective."""

    def detach(self) -> None:
        """Let go of the parameters: another strategy takes over. They stay where they are."""
        if self.reducer is not None:
            self.reducer.release()

    def take_over(self, old: Strategy) -> None:
        """Go on where a strategy that has settled stands, which may have had other parameters."""

    def follow(self, has_changed: Callable[[], bool]) -> None:
        """Have ranks compare, with each reduction, whether their optimizers have other parameters than they had."""

    def before_change(self) -> None:
        """Reduce all gradients, before another strategy takes over in the middle of a step. Collective.

        The optimizer has got other parameters since it was wrapped. UsageError if the algorithm cannot go on with them.
        """
        raise UsageError(
            f"the wrapped optimizer has other parameters than when it was wrapped, and {self.algorithm.label} cannot "
            "take them in within a step: change them by add_param_group() of the DistributedOptimizer, or wrap a new "
            "optimizer"
        )

    def after_change(self, names: Sequence[str], added: Sequence[torch.Tensor]) -> None:
        """Go on with gradients that another strategy has reduced, but for those of some parameters. Collective.

        Args:
            names: of those.
            added: they are new.
        """

    def do_together(self, work: Callable[[], None]) -> None:
        """Do `work()`, which is collective."""
        work()

    def ranks_of_model(self) -> ProcessSet | None:
        """Return the ranks that average their gradients, so that they have one model; None: each has its own.

        Collective the first time.
        """
        return self.settings.process_set

    # ---- state -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any] | None:
        """Return what `DistributedOptimizer.state_dict()` keeps of the algorithm; None: nothing."""
        return None

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise UsageError for a state of another algorithm."""

    def go_on_from(self, state: dict[str, Any]) -> None:
        """Go on where a checkpoint was taken, by all ranks alike."""

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the optimizer's state as that of whole parameters."""
        return optimizer.state_dict()

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Load a state of whole parameters."""
        optimizer.load_state_dict(state)

    def state_of_copies(self) -> dict[str, Any] | None:
        """Return what a copy of the optimizer begins with; None: as a new one."""
        return None

    # ---- what users may ask ------------------------------------------------------------------------------------

    @property
    def statistics(self) -> Any:
        """What the algorithm tells of its steps; NoSuchAttribute if it tells nothing."""
        raise NoSuchAttribute(f"there are no statistics of {self.algorithm}")

    def noted(self) -> Mapping[str, Mapping[str, Any]]:
        """Return what has happened since the last call that a record of the run is to have.

        Lines by their kind (docs/report.md), with their values.
        """
        return _NOTHING

    def report_metric(self, metric: float, rate: float) -> None:
        """Take in how training goes. Collective.

        Args:
            metric: this rank's, such as a loss.
            rate: the learning rate of the first parameter group.
        """
        raise UsageError(f"report_metric() has no effect with {self.algorithm}")

    @property
    def sent(self) -> Sent | None:
        """Which items the last step has sent, for an algorithm that leaves some out; see `traffic.Phase`."""
        return None

    def scaler_problem(self) -> str | None:
        """Return why GradScaler cannot be used now; None if it can."""
        return None

    def skip_problem(self) -> str | None:
        """Return why `skip_synchronize()` cannot be used; None if it can."""
        return None
