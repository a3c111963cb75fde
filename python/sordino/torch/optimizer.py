"""Optimizer wrapper for every algorithm.

It is a `torch.optim.Optimizer` that delegates the arithmetic to the wrapped one. Everything that a user or a scheduler
reads or writes (param_groups, state, defaults, hooks) belongs to the wrapped optimizer.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from sordino.algorithms import Algorithm, AlgorithmName, resolve
from sordino.algorithms.strategy import Strategy
from sordino.codecs import Codec
from sordino.errors import StepOrderError, UsageError
from sordino.runtime.collectives.compression import Compression, Compressor
from sordino.runtime.collectives.operation import Average, resolve_op
from sordino.runtime.context import current, members_of
from sordino.runtime.gradients.options import Groups, Options
from sordino.runtime.process_set import ProcessSet, global_process_set
from sordino.torch import dcp
from sordino.torch.arguments import Named, compression_of, name_parameters, parameters_of
from sordino.torch.mesh import ranks_along
from sordino.torch.optimizer_state import load_state, state_of
from sordino.torch.scaler import step_scaled, unscales
from sordino.torch.sync_batch_norm import warn_of_local_statistics
from sordino.torch.wrapping import Wrapping


def _half_built(kind: type[DistributedOptimizer]) -> DistributedOptimizer:
    """Return an optimizer for `__setstate__` to complete."""
    return kind.__new__(kind)


class DistributedOptimizer(torch.optim.Optimizer):
    """Optimizer whose `step()` uses the computations of all ranks.

    Use it in place of the optimizer that it wraps. The training loop does not change. Collective: all ranks of the
    process set wrap the same model, which is compared here (`LayoutMismatch` names the difference).

    Args:
        optimizer: any `torch.optim` optimizer. It keeps its state, hyper-parameters and hooks.
        named_parameters: `model.named_parameters()`. Names make errors and traces readable.
        compression: `Compression.none`, `.fp16` or `.bf16`; or a codec such as `Int8()` or `PowerSGD(rank=2)`, or its
            name. A codec sends fewer bytes, and computes averages in float32 once backward has ended. What the encoding
            of a step has lost is sent in later steps (`sordino.codecs`). It is in `state_dict()` of the rank that has
            lost it.
        backward_passes_per_step: number of backward passes whose gradients are summed locally before one reduction.
        op: Average (default), Sum, Adasum, Min, Max or Product.
        gradient_predivide_factor: f: averaging is 1/f before the sum and f/N after it (op=Average only).
        num_groups: deprecated, use `groups`.
        groups: gradients to reduce together: a number of groups, or lists of parameters. Each device and dtype of a
            group is reduced by itself.
        sparse_as_dense: whether to make sparse gradients dense before they are reduced.
        process_set: the ranks that train together.
        mesh: instead of `process_set`: a dimension of a DeviceMesh of all ranks, `device_mesh["replicate"]`. The ranks
            along it train together. Parameters may be DTensors that are sharded over other dimensions (FSDP2, tensor
            parallelism): algorithms exchange local shards. Replicas must start equal. Collective over all ranks.
        algorithm: an algorithm of `sordino.algorithms`, its name, or None for `AllReduce()`.
        named_buffers: `model.named_buffers()`, for algorithms with `buffers="average"`.
        check_finite: whether gradients with NaN or Inf on any rank make `step()` raise `NonFinite` on all ranks, before
            anything is changed. Not with GradScaler.

    Raises:
        UsageError: an argument is wrong. LayoutMismatch: ranks wrap different models. ConfigurationMismatch: ranks give
            different arguments.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Named | None = None,
        compression: type[Compressor] | Codec | str = Compression.none,
        backward_passes_per_step: int = 1,
        op: int = Average,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: Groups = None,
        sparse_as_dense: bool = False,
        process_set: ProcessSet = global_process_set,
        algorithm: Algorithm | AlgorithmName | None = None,
        named_buffers: Named | None = None,
        check_finite: bool = False,
        mesh: Any = None,
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(f"DistributedOptimizer wraps a torch.optim.Optimizer, not a {type(optimizer).__name__}")
        if gradient_predivide_factor != 1.0 and op != Average:
            raise UsageError("gradient_predivide_factor not supported with op != Average")
        if backward_passes_per_step <= 0:
            raise UsageError(f"backward_passes_per_step must be > 0, not {backward_passes_per_step}")
        if mesh is not None:
            process_set = ranks_along(mesh, process_set)
        cast, codec = compression_of(compression)
        # super().__init__ is not called, because there is only one set of groups and state, the wrapped optimizer's.
        self._inner = optimizer
        warn_of_local_statistics(named_parameters)
        names = name_parameters(optimizer, named_parameters)
        options = Options(
            algorithm=resolve(algorithm),
            compression=cast,
            codec=codec,
            backward_passes_per_step=backward_passes_per_step,
            op=resolve_op(op, None),
            gradient_predivide_factor=gradient_predivide_factor,
            groups=groups if groups is not None else (num_groups or None),
            sparse_as_dense=sparse_as_dense,
            process_set=process_set,
            named_buffers=None if named_buffers is None else list(named_buffers),
            check_finite=check_finite,
            members=members_of(current(), process_set),
            mesh=mesh is not None,
        )
        options.check()
        self._may_synchronize = True
        self._asked = False  # whether synchronize() was called for this step's gradients
        self._wrapping = Wrapping(optimizer, names, options, compare=True)
        recorder = self._strategy.context.recorder
        if recorder is not None:
            used = self._strategy.algorithm
            recorder.wrapped(used.label, used.written(), parameters_of(optimizer), type(optimizer).__name__)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # True: GradScaler calls step() even if gradients are infinite. A gossip worker must still exchange then, and
        # with check_finite step() refuses them. False: GradScaler unscales first, because a wrapped optimizer that
        # unscales by itself is not given the scale. This property must not raise.
        return self._options.check_finite or self._strategy.steps_always

    @property
    def _strategy(self) -> Strategy:
        return self._wrapping.strategy

    @property
    def _options(self) -> Options:
        return self._wrapping.options

    # ---- attributes of the wrapped optimizer -------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        # GradScaler.unscale_ and others get the gradients through this after backward, so they must be reduced: else
        # each rank would decide by its own gradients whether to step. Not with `partial_state`, where reducing takes
        # more exchanges than step(): a single rank that reads this would wait for the others.
        strategy = self._wrapping.strategy
        if self._may_synchronize and not strategy.partial_state:
            if unscales():
                self._wrapping.reduce_all()
            elif strategy.ready:
                strategy.synchronize()
        groups = self._inner.param_groups
        return dcp.with_key(groups) if dcp.MODULE in sys.modules else groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._inner.param_groups = groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        self._strategy.complete()
        return dcp.with_names(self._inner.state) if self._strategy.partial_state else self._inner.state

    @state.setter
    def state(self, state: Any) -> None:
        self._inner.state = state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self._inner.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self._inner.defaults = defaults

    if not TYPE_CHECKING:  # in a type checker it would hide misspelt names

        def __getattr__(self, name: str) -> Any:
            if name == "_inner":  # incomplete, during copy or pickle
                raise AttributeError(name)
            if isinstance(getattr(type(self), name, None), property):
                return object.__getattribute__(self, name)  # raises the AttributeError of the property again
            return getattr(self._inner, name)

        @property
        def __class__(self) -> type:
            # So that isinstance(optimizer, AdamW) is the same as for the wrapped one, since other code depends on that.
            # type() is still DistributedOptimizer, so isinstance() of that holds, too.
            inner = self.__dict__.get("_inner")
            return type(self) if inner is None else inner.__class__

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        # Horovod's name for it, which scripts and Horovod's tests read.
        return self._wrapping.names

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state, which can be loaded with and without Sordino.

        The state of an algorithm, if it has one, is under the key "sordino", with the algorithm's name. So are the
        residuals of codecs with error feedback, of this rank only (docs/compression.md). Collective if each rank has a
        shard of the optimizer's state (`LocalSGD`).
        """
        state = state_of(self._strategy, self._inner)
        if dcp.KEY in state:
            state = dcp.pack(state)
            self._strategy.context.note_return()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of the wrapped optimizer. Reductions in flight are completed first.

        Residuals of error feedback are loaded from the state, or become 0. A state has only the residuals of the rank
        that has saved it; a warning names lost residuals. Collective if each rank has a shard of the optimizer's state
        (`LocalSGD`).

        Raises:
            UsageError: the state is of another algorithm.
        """
        if self._strategy.in_flight:
            self.synchronize()
        load_state(self._strategy, self._inner, state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, which are reduced like the others from now on. Collective."""
        self._wrapping.require_between_steps("add_param_group()")
        self._wrapping.add_param_group(param_group)

    def register_step_pre_hook(self, hook: Any) -> Any:
        """Register a hook that the wrapped optimizer calls before its step.

        The hook gets the wrapped optimizer, and sees reduced gradients (with `LocalSGD(exchange="sharded")` slices of
        them).
        """
        return self._inner.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        """Register a hook that the wrapped optimizer calls after its step. The hook gets the wrapped optimizer."""
        return self._inner.register_step_post_hook(hook)

    def __repr__(self) -> str:
        parts = self._strategy.parts
        return f"DistributedOptimizer({self._options.algorithm}, {parts}{', ' if parts else ''}{self._inner!r})"

    # ---- copies ------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return self._wrapping.state_of_copies()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._inner = state["inner"]
        self._may_synchronize = True
        self._asked = False  # whether synchronize() was called for this step's gradients
        self._wrapping = Wrapping.of_copy(state)

    def __dir__(self) -> list[str]:
        return sorted({*dir(type(self)), *vars(self)})  # object.__dir__ would use __class__

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The version of object requires __class__ to be type().
        return _half_built, (type(self),), self.__getstate__()

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedOptimizer:
        """Return a wrapper of a copy of the optimizer. If the model is copied as well, it has the copied parameters."""
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        state = self.__getstate__()
        options = state["options"]
        if isinstance(options.groups, Sequence):
            options = replace(options, groups=copy.deepcopy(options.groups, memo))
        options = replace(options, named_buffers=copy.deepcopy(options.named_buffers, memo))
        clone.__setstate__({**state, "inner": copy.deepcopy(self._inner, memo), "options": options})
        return clone

    # ---- the step ----------------------------------------------------------------------------------------------

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change the number of backward passes that are summed before a reduction. Collective, between steps."""
        self._wrapping.require_between_steps("set_backward_passes_per_step()")
        if passes <= 0:
            raise UsageError(f"backward_passes_per_step must be > 0, not {passes}")
        self._wrapping.change_options(backward_passes_per_step=passes)

    def synchronize(self) -> None:
        """Wait until all gradients are reduced, also after fewer passes than `backward_passes_per_step`.

        Call it before gradients are clipped or inspected, unless `gradients_ready()` is True.
        """
        self._strategy.synchronize()
        self._asked = True

    def gradients_ready(self) -> bool:
        """Return whether `.grad` of every parameter has the value that `step()` will use.

        This is so when `backward()` has returned (the last of `backward_passes_per_step`), except with `Layered` and
        `LocalSGD(exchange="sharded")`. They average gradients until `step()`, and a use of a gradient before
        `synchronize()` raises `StepOrderError`.
        """
        return self._strategy.final

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale the gradients that `step()` will use, as `torch.nn.utils.clip_grad_norm_` does.

        Correct for every algorithm. Collective, between backward and `step()`.

        Args:
            max_norm: largest norm of all gradients together.
            norm_type: order of the norm; may be `inf`.
            error_if_nonfinite: whether to raise RuntimeError if the norm is NaN or infinite.

        Returns:
            the norm before scaling, the same on all ranks that have the same gradients.
        """
        return self._strategy.clip(float(max_norm), float(norm_type), error_if_nonfinite)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward passes within the block only add to this rank's gradients, as with DDP.

        Use it for all backward passes of a step except the last. They do not count as `backward_passes_per_step`.
        """
        before, self._strategy.accumulates = self._strategy.accumulates, True
        try:
            yield
        finally:
            self._strategy.accumulates = before

    def flush(self) -> None:
        """Apply everything that is in flight, so that the parameters are the complete state of the model. Collective.

        Between steps, `PushSum(overlap=...)`, `ADPSGD` and `LocalSGD(overlap=True)` have parameters in flight,
        `AllReduce(double_buffering=True)` a gradient, and `DiLoCo(overlap=...)` an outer gradient. `CaPS` has skipped
        parameters, which are averaged here.
        """
        strategy = self._strategy
        with self._wrapping.claim.stepping():
            strategy.do_together(lambda: strategy.drain(self._inner))
        strategy.context.note_return()

    @contextmanager
    def outer_parameters(self) -> Iterator[None]:
        """Put the outer parameters of `DiLoCo` or `NoLoCo` into the model within the block, to evaluate or save them.

        They are the same on all ranks with `DiLoCo`. With `NoLoCo` each worker has its own. After the block the model
        has this rank's own parameters again; do not train within it. With `DiLoCo(overlap=...)`, an outer gradient in
        flight is not included; `flush()` applies it.

        Raises:
            UsageError: the algorithm has no outer parameters.
        """
        with self._strategy.outer_parameters():
            yield

    @property
    def distances(self) -> list[tuple[int, float]]:
        """Steps of `LocalSGD(log_distance=...)`, each with the distance of the local models from their mean."""
        return self._strategy.distances

    @property
    def statistics(self) -> Any:
        """Statistics of the algorithm. Raises NoSuchAttribute if it keeps no statistics.

        `CaPS` (`CaPSStatistics`): unchanged, skipped and sent elements. `ScheduledPull` (`PullStatistics`) and `ADPSGD`
        (`PairStatistics`): averagings, and their cost on this rank. Gossip with `compression` (`MixingStatistics`):
        blocks of values that were received, and those that could not be decoded.
        """
        return self._strategy.statistics

    def report_metric(self, metric: float) -> None:
        """Report a metric of the training to an adaptive algorithm. Collective.

        For `LocalSGD(adaptive=...)` this is the loss, whenever it is known. For `CaPS` it is the metric of its
        scheduler, at the end of each epoch.

        Args:
            metric: the value on this rank. The algorithm gets the mean over all ranks.
        """
        rate = self._inner.param_groups[0].get("lr")
        self._strategy.report_metric(metric, None if rate is None else float(rate))
        self._strategy.context.note_return()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Keep `step()` from synchronizing within the block, for use after an explicit `synchronize()`."""
        problem = self._strategy.skip_problem()
        if problem is not None:
            raise StepOrderError(problem)
        self._may_synchronize = False
        try:
            yield
        finally:
            self._may_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Reduce the gradients that are not reduced yet, and run the wrapped optimizer's step.

        Args:
            closure: as for the wrapped optimizer. Gradients are reduced after each evaluation of it.
        """
        wrapping = self._wrapping
        if dcp.MODULE in sys.modules and dcp.makes_state():
            with wrapping.claim.stepping():
                return self._inner.step()
        if self._may_synchronize and self._asked and wrapping.strategy.done:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). "
                "The gradients are not reduced again; Horovod would.",
                stacklevel=2,
            )
        self._asked = False
        reducer, claim = wrapping.strategy.reducer, wrapping.claim
        if reducer is not None and reducer.backwards:
            reducer.require_whole("step()")
        if claim.has_changed():
            wrapping.take_in_changes()
        strategy = wrapping.strategy
        context = strategy.context
        recorder = context.recorder
        if context.newcomer is not None:
            raise UsageError(
                "step() was called in a process that has yet to join the running job, and would train alone. Call it "
                "in a function that is decorated by hvd.elastic.run, which joins first"
            )
        if recorder is not None:
            recorder.begins()
        claim.open = True  # set directly, because stepping() would cost two calls per step
        claim.steps += 1
        try:
            if "found_inf" in self.__dict__:  # called by GradScaler
                synchronize, checks = self._may_synchronize, wrapping.options.check_finite
                result = step_scaled(self, strategy, self._inner, closure, synchronize, checks)
            else:
                result = strategy.step(self._inner, closure, self._may_synchronize)
        finally:
            claim.open = False
        if recorder is not None:
            recorder.step(strategy.noted())
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients like the wrapped optimizer.

        Raises StepOrderError while gradients are being reduced (`gradients_ready()`).
        """
        reducer = self._wrapping.strategy.reducer
        if reducer is not None and reducer.touched:
            reducer.clear(self._inner, set_to_none)
        else:
            self._inner.zero_grad(set_to_none=set_to_none)
        self._asked = False
