"""Strategy for all-reduce with double buffering: each step uses the average gradient of the step before.

While a step computes, the reduction of the previous step's gradients is in flight. At the end of a cycle (the backward
passes of one step) the reducer waits for the buckets of the previous cycle, and their averages become the parameters'
gradients. The buckets of this cycle are set aside, with their tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from sordino.algorithms.allreduce import AllReduce
from sordino.algorithms.exchanging import ExchangingStrategy
from sordino.algorithms.strategy import Closure
from sordino.errors import StepOrderError, UsageError
from sordino.runtime.context import Context
from sordino.runtime.gradients.bucket import Bucket
from sordino.runtime.gradients.misuse import QUIETLY
from sordino.runtime.gradients.reducer import GradientReducer
from sordino.runtime.gradients.settings import Settings


class BufferedReducer(GradientReducer):
    """Reducer that starts the reduction of a cycle's gradients and returns the averages of the previous cycle.

    Each bucket has a twin, and cycles use the two in turn. A cycle begins with the averages from two cycles before it
    as gradients, which the same twin has reduced. So gradients that persist stay in the memory of their twin.
    """

    instead_of_sparse = "with double buffering"

    def __init__(
        self, context: Context, names: Sequence[str], parameters: Sequence[torch.Tensor], settings: Settings
    ) -> None:
        self._turn = 0
        self._twins: dict[str, tuple[Bucket, Bucket]] = {}  # by name of the bucket
        super().__init__(context, names, parameters, settings, compare=True)
        self._take_turn(0)
        self._set_aside: list[Bucket] = []  # buckets of the previous cycle, in flight
        self._landed: dict[int, torch.Tensor] | None = None  # their averages; None until `_wait`

    def _take_turn(self, turn: int) -> None:
        self._turn = turn
        self._suffix = f".{turn % 2}"  # distinct names, because the previous cycle's bucket may be in flight
        if self._buckets is not None:
            self._buckets = [self._of_turn(bucket) for bucket in self._buckets]

    def _of_turn(self, bucket: Bucket) -> Bucket:
        """Return the twin that this cycle uses."""
        return self._twins[bucket.name][self._turn % 2]

    def _make_bucket(self, name: str, members: list[int]) -> Bucket:
        self._twins[name] = super()._make_bucket(name, members), super()._make_bucket(name, members)
        return self._twins[name][self._turn % 2]

    def _begin_again(self, index: int) -> None:
        raise StepOrderError(
            f"a backward() has added to the gradient of '{self.names[index]}', which held the average of the previous "
            f"step, for step() to use. {QUIETLY}"
        )

    def _start(self, bucket: Bucket) -> None:
        super()._start(self._of_turn(bucket))

    @property
    def averages(self) -> dict[int, torch.Tensor]:
        """The gradients that the next step will use, by the number of the parameter."""
        if not self._counter.done:
            return self._wait()
        return {i: parameter.grad for i, parameter in enumerate(self.parameters) if parameter.grad is not None}

    def _wait(self) -> dict[int, torch.Tensor]:
        """Wait for the averages of the previous cycle, and return them by the number of the parameter."""
        if self._landed is None:
            buckets, self._set_aside, self._unused = self._set_aside, [], set()
            # Called here, so that errors come before the optimizer's step.
            self.settings.refusals([bucket.looked for bucket in buckets])
            landed: dict[int, torch.Tensor] = {}
            for bucket in buckets:
                self._wait_for(bucket)
                found = bucket.collect()
                bucket.results = {i: weakref.ref(average) for i, average in found.items()}
                landed.update(found)
                self._unused.update(i for i in bucket.members if i not in landed)
            self._landed = landed
        return self._landed

    def restore(self, averages: dict[int, torch.Tensor]) -> None:
        """Continue as if these were the averages of the previous cycle."""
        self._wait()
        self._landed = averages

    def use(self) -> None:
        """Set the parameters' gradients to the averages of the previous cycle."""
        averages = self._wait()
        for i, parameter in enumerate(self.parameters):
            parameter.grad = averages.get(i)
        self._landed = {}

    def synchronize(self) -> None:
        """Start the reductions that have not started, and set the gradients to the previous cycle's averages."""
        if self.backwards:
            self._forget_cut_off()
        if not self.active or self._counter.done:
            return
        self._start_rest()
        buckets = self._buckets or []
        self.use()
        self._set_aside, self._landed = buckets, None
        self._take_turn(self._turn + 1)
        self._counter.done = self.touched = True

    def clear(self, optimizer: torch.optim.Optimizer, set_to_none: bool) -> None:
        if self._counter.done:
            raise StepOrderError(
                "zero_grad() between backward() and step() would lose the gradient in flight: call it after step()"
            )
        super().clear(optimizer, set_to_none)


class BufferedStrategy(ExchangingStrategy):
    """Strategy for `AllReduce(double_buffering=True)`."""

    algorithm: AllReduce
    whole_models = False  # no meeting is needed: the reducer itself finds gradients of unfrozen parameters

    def prepare(self) -> None:
        self._loaded: dict[str, torch.Tensor] = {}  # initial averages, by the parameter's name

    def attach(self) -> None:
        self._buffered = BufferedReducer(self.context, self.names, self.parameters, self.settings)
        self.reducer = self._buffered
        self._restore(self._loaded)

    def step_optimizer(self, optimizer: torch.optim.Optimizer, closure: Closure, synchronize: bool) -> Any:
        if closure is not None:
            raise UsageError(
                "step(closure) needs the gradients of this step, but double buffering uses those of the previous step: "
                "call step() without a closure, or use AllReduce()"
            )
        return super().step_optimizer(optimizer, None, synchronize)

    def after_step(self) -> None:
        self.steps += 1

    def scaler_problem(self) -> str | None:
        if not self.active:
            return None
        return (
            "AllReduce(double_buffering=True) uses gradients of the previous step, but GradScaler has the scale of the "
            "current one; train without a scaler (bfloat16 needs none)"
        )

    def drain(self, optimizer: torch.optim.Optimizer) -> None:
        """Take a step with the last average gradient. Collective."""
        if self.in_flight or self.done:
            raise StepOrderError("flush() was called between backward() and step(): call it after step()")
        if self._met:
            kept = [parameter.grad for parameter in self.parameters]
            self._buffered.use()
            try:
                self.guarded(optimizer).step()
            finally:
                for parameter, grad in zip(self.parameters, kept):
                    parameter.grad = grad

    def settle(self, optimizer: torch.optim.Optimizer) -> None:
        pass  # `state_dict` contains the averages

    def state_dict(self) -> dict[str, Any]:
        gradients = self._loaded
        if self._met:
            gradients = {self.names[i]: value.clone() for i, value in self._buffered.averages.items()}
        return {"steps": self.steps, "gradients": gradients}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
        self._restore(state["gradients"])

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        super().load_optimizer_state(optimizer, state)
        self._restore({})  # gradients in flight belong to the parameters before the load

    def forget_loaded(self) -> None:
        self._loaded = {}

    def _restore(self, gradients: dict[str, torch.Tensor]) -> None:
        self._loaded = gradients
        if self.reducer is not None:
            numbers = {name: i for i, name in enumerate(self.names)}
            found = {numbers[name]: value.clone() for name, value in gradients.items() if name in numbers}
            self._buffered.restore(found)
