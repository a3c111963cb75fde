"""One delegating optimizer for every algorithm.

It is a real `torch.optim.Optimizer`, and the wrapped one does the arithmetic. All that a user or a scheduler reads or
writes (param_groups, state, defaults, hooks) is the wrapped one's.
"""

from __future__ import annotations

import copy
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from sordino.algorithms import Algorithm, AlgorithmName, resolve
from sordino.algorithms.strategy import Strategy
from sordino.errors import StepOrderError, UsageError
from sordino.runtime.compression import Compression, Compressor
from sordino.runtime.context import current, members_of
from sordino.runtime.operation import Average, resolve_op
from sordino.runtime.options import Groups, Options
from sordino.runtime.process_set import ProcessSet, global_process_set
from sordino.torch import dcp
from sordino.torch.arguments import Named, name_parameters, parameters_of
from sordino.torch.claims import Claim
from sordino.torch.factory import make_strategy
from sordino.torch.scaler import step_scaled
from sordino.torch.sync_batch_norm import warn_of_local_statistics


def _half_built(kind: type[DistributedOptimizer]) -> DistributedOptimizer:
    """Return an optimizer for `__setstate__` to complete."""
    return kind.__new__(kind)


class DistributedOptimizer(torch.optim.Optimizer):
    """An optimizer whose `step()` uses what all ranks computed.

    Use it in place of the optimizer it wraps; the training loop does not change. Collective: all ranks of the process
    set wrap the same model (compared here; `LayoutMismatch` names the difference).

    Args:
        optimizer: any `torch.optim` optimizer. Its state, hyper-parameters and hooks stay its own.
        named_parameters: `model.named_parameters()`; names make errors and traces readable.
        compression: `Compression.none`, `.fp16` or `.bf16`.
        backward_passes_per_step: gradients of this many backward passes are summed locally before one reduction.
        op: Average (default), Sum, Adasum, Min, Max or Product.
        gradient_predivide_factor: splits the averaging in 1/f before the sum and f/N after it (op=Average only).
        num_groups: deprecated, use `groups`.
        groups: which gradients to reduce together: a number of groups, or lists of parameters.
        sparse_as_dense: makes sparse gradients dense before they are reduced.
        process_set: the ranks that train together.
        algorithm: an algorithm of `sordino.algorithms`, its name, or None for `AllReduce()`.
        named_buffers: `model.named_buffers()`, for algorithms with `buffers="average"`.
        check_finite: gradients with NaN or Inf on any rank make `step()` raise `NonFinite` on all, before anything is
            changed. Not with GradScaler.

    Raises:
        UsageError: an argument is wrong. LayoutMismatch: ranks wrap different models. ConfigurationMismatch: they give
            different arguments.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Named | None = None,
        compression: type[Compressor] = Compression.none,
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
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(f"DistributedOptimizer wraps a torch.optim.Optimizer, not a {type(optimizer).__name__}")
        if gradient_predivide_factor != 1.0 and op != Average:
            raise UsageError("gradient_predivide_factor not supported with op != Average")
        if backward_passes_per_step <= 0:
            raise UsageError(f"backward_passes_per_step must be > 0, not {backward_passes_per_step}")
        # super().__init__ is not called on purpose: there is one set of groups and state, the wrapped optimizer's.
        self._inner = optimizer
        warn_of_local_statistics(named_parameters)
        self._names = name_parameters(optimizer, named_parameters)
        self._options = Options(
            algorithm=resolve(algorithm),
            compression=compression,
            backward_passes_per_step=backward_passes_per_step,
            op=resolve_op(op, None),
            gradient_predivide_factor=gradient_predivide_factor,
            groups=groups if groups is not None else (num_groups or None),
            sparse_as_dense=sparse_as_dense,
            process_set=process_set,
            named_buffers=None if named_buffers is None else list(named_buffers),
            check_finite=check_finite,
            members=members_of(current(), process_set),
        )
        self._options.check()
        self._may_synchronize = True
        self._asked = False  # synchronize() was called for this step's gradients
        self._claim = Claim(optimizer, self._names)
        try:
            self._strategy = self._make_strategy(compare=True)
        except BaseException:
            self._claim.release()  # the traceback may keep this object alive
            raise
        recorder = self._strategy.context.recorder
        if recorder is not None:
            used = self._strategy.algorithm
            recorder.wrapped(used.label, used.written(), parameters_of(optimizer), type(optimizer).__name__)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # True: GradScaler calls step() also when gradients are infinite. Gossip needs that: such a worker must still
        # exchange. Otherwise it must unscale by itself: a wrapped optimizer that can do it would not see the scale.
        # With check_finite step() is to be called so that it can refuse; what is only looked at must not raise.
        return self._options.check_finite or self._strategy.steps_always

    def _make_strategy(self, compare: bool) -> Strategy:
        parameters = parameters_of(self._inner)
        names = [self._names[p] for p in parameters]
        strategy = make_strategy(self._inner, parameters, names, self._options, compare)
        strategy.stepping = self._claim.stepping
        strategy.follow(self._claim.has_changed)
        strategy.context.on_end[id(self)] = weakref.WeakMethod(self._world_ended)
        return strategy

    def _world_ended(self) -> None:
        """Give the parameters back: another world may train them."""
        self._claim.release()
        if self._strategy.reducer is not None:
            self._strategy.reducer.release()

    def _take_in_changes(self) -> None:
        """Go on with the parameters that the wrapped optimizer has now, and reduce the new ones' gradients. Collective.

        Raises:
            UsageError: the algorithm cannot. StepOrderError: they were changed since backward(). LayoutMismatch: ranks
                have changed them differently; on all of them.
        """
        old, known = self._strategy, self._claim.keys
        added = [parameter for parameter in parameters_of(self._inner) if id(parameter) not in known]
        self._names = {**name_parameters(self._inner, None), **self._names}
        old.before_change()
        new = self._make_strategy(compare=True)
        try:
            self._claim.take(self._names)
        except UsageError:
            new.detach()
            raise
        old.detach()
        self._strategy = new
        new.after_change([self._names[parameter] for parameter in added], added)

    @contextmanager
    def _new_strategy(self) -> Iterator[None]:
        """Replace the strategy: after the block another one goes on with what has been changed within it."""
        old = self._strategy
        old.do_together(lambda: old.settle(self._inner))
        yield
        old.detach()
        self._strategy = self._make_strategy(compare=True)
        self._strategy.take_over(old)
        self._strategy.context.returned()

    # ---- what the wrapped optimizer owns -----------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        # GradScaler.unscale_ and others reach the gradients through here after backward: they must see reduced ones.
        # Not where that takes more exchanges than step() would: one rank that looks alone would wait for the others.
        if self._may_synchronize and self._strategy.ready and not self._strategy.partial_state:
            self._strategy.synchronize()
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

    if not TYPE_CHECKING:  # where it would hide names that are misspelt

        def __getattr__(self, name: str) -> Any:
            if name == "_inner":  # half-built, as copy and pickle make it
                raise AttributeError(name)
            if isinstance(getattr(type(self), name, None), property):
                return object.__getattribute__(self, name)  # which has raised AttributeError, and does it again
            return getattr(self._inner, name)

        @property
        def __class__(self) -> type:
            # So that isinstance(optimizer, AdamW) holds as for the wrapped one, on which code decides what there is.
            # type() is DistributedOptimizer all the same, and so isinstance() of that holds, too.
            inner = self.__dict__.get("_inner")
            return type(self) if inner is None else inner.__class__

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        # Horovod's name for it, which scripts and its tests read.
        return self._names

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state, loadable with and without Sordino.

        Algorithms that have a state of their own keep it under the key "sordino", with the algorithm's name. Collective
        where ranks have a shard of the optimizer's state each (`LocalSGD`).
        """
        own = self._strategy.state_dict()
        if own is None:
            return self._inner.state_dict()
        named = {"algorithm": self._strategy.algorithm.label, **own}
        state = dcp.pack({**self._strategy.optimizer_state(self._inner), dcp.KEY: named})
        self._strategy.context.returned()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of the wrapped optimizer; reductions under way are brought to their end first.

        Collective where ranks have a shard of it each (`LocalSGD`).

        Raises:
            UsageError: the state is of another algorithm.
        """
        if self._strategy.in_flight:
            self.synchronize()
        inner, own = dcp.unpack(state_dict)
        if own is not None:
            own = self._own_state(own)
            self._strategy.check_state(own)
        self._strategy.load_optimizer_state(self._inner, inner)
        self._strategy.reset()
        if own is not None:
            self._strategy.go_on_from(own)

    def _own_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the algorithm's state without its name. UsageError if it is another algorithm's."""
        algorithm, named = self._strategy.algorithm, state.get("algorithm", "another algorithm")
        foreign = "algorithm" in state and named != algorithm.label
        if foreign or self._strategy.state_dict() is None:
            raise UsageError(
                f"this state was saved by {named}, and the optimizer uses {algorithm}. Use the algorithm that it was "
                f"saved by, or drop what that one has kept, to begin {algorithm.label} with it: "
                "del state_dict['sordino']"
            )
        return {key: value for key, value in state.items() if key != "algorithm"}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, which are reduced like the others from now on. Collective."""
        self._between_steps("add_param_group()")
        known = len(self._inner.param_groups)
        with self._new_strategy():
            self._inner.add_param_group(param_group)
            self._names = {**name_parameters(self._inner, None), **self._names}
            try:
                self._claim.take(self._names)
            except UsageError:
                del self._inner.param_groups[known:]
                raise

    def register_step_pre_hook(self, hook: Any) -> Any:
        """Register a hook that the wrapped optimizer calls before its step.

        It is as of the wrapped optimizer; the hook sees reduced gradients (with `LocalSGD(exchange="sharded")` slices).
        """
        return self._inner.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        """Register a hook that the wrapped optimizer calls after its step, as of the wrapped optimizer."""
        return self._inner.register_step_post_hook(hook)

    def __repr__(self) -> str:
        parts = self._strategy.parts
        return f"DistributedOptimizer({self._options.algorithm}, {parts}{', ' if parts else ''}{self._inner!r})"

    # ---- copies ------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        self._strategy.complete()
        if self._strategy.partial_state and self._inner.state:
            raise UsageError(
                f"with {self._options.algorithm} a rank has a part of the state only; copy its state_dict() instead"
            )
        names = [self._names[parameter] for parameter in parameters_of(self._inner)]
        under_way = self._strategy.state_of_copies()
        return {"inner": self._inner, "names": names, "options": self._options, "under way": under_way}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._inner = state["inner"]
        self._names = dict(zip(parameters_of(self._inner), state["names"]))
        self._options = state["options"]
        self._may_synchronize = True
        self._asked = False  # synchronize() was called for this step's gradients
        self._claim = Claim(self._inner, self._names)
        self._strategy = self._make_strategy(compare=False)
        if state.get("under way") is not None:
            self._strategy.go_on_from(state["under way"])

    def __dir__(self) -> list[str]:
        return sorted({*dir(type(self)), *vars(self)})  # which object would look for at __class__

    def __reduce_ex__(self, protocol: Any) -> Any:
        # That of object wants __class__ to be type().
        return _half_built, (type(self),), self.__getstate__()

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedOptimizer:
        """Return a wrapper of a copy of the optimizer; of the copied parameters, if the model is copied with it."""
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        state = self.__getstate__()
        options = state["options"]
        if isinstance(options.groups, Sequence):
            options = replace(options, groups=copy.deepcopy(options.groups, memo))
        clone.__setstate__({**state, "inner": copy.deepcopy(self._inner, memo), "options": options})
        return clone

    # ---- the step ----------------------------------------------------------------------------------------------

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many backward passes are summed before a reduction. Collective, between steps."""
        self._between_steps("set_backward_passes_per_step()")
        if passes <= 0:
            raise UsageError(f"backward_passes_per_step must be > 0, not {passes}")
        with self._new_strategy():
            self._options = replace(self._options, backward_passes_per_step=passes)

    def synchronize(self) -> None:
        """Wait until all gradients are reduced, also those of fewer backward passes than `backward_passes_per_step`.

        To clip or inspect gradients it is needed where `gradients_ready()` says so.
        """
        self._strategy.synchronize()
        self._asked = True

    def gradients_ready(self) -> bool:
        """Return whether `.grad` of every parameter is what `step()` will use.

        It is when `backward()` has returned (the last of `backward_passes_per_step`), but for `Layered` and
        `LocalSGD(exchange="sharded")`: they average gradients until `step()`, and who uses one before `synchronize()`
        gets a `StepOrderError`.
        """
        return self._strategy.final

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale the gradients that `step()` will use, as `torch.nn.utils.clip_grad_norm_` does.

        Right for every algorithm. Collective, between backward and `step()`.

        Args:
            max_norm: of all gradients together.
            norm_type: order of the norm; may be `inf`.
            error_if_nonfinite: raises RuntimeError if the norm is NaN or infinite.

        Returns:
            the norm before, the same on all ranks that have the same gradients.
        """
        return self._strategy.clip(float(max_norm), float(norm_type), error_if_nonfinite)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Have backward passes within the block only add to this rank's gradients, as with DDP.

        Use it for all but the last one of a step. They do not count as `backward_passes_per_step`.
        """
        before, self._strategy.accumulates = self._strategy.accumulates, True
        try:
            yield
        finally:
            self._strategy.accumulates = before

    def flush(self) -> None:
        """Take in what is still under way, so that parameters depend on nothing but themselves. Collective.

        Between steps, `PushSum(overlap=...)`, `ADPSGD` and `LocalSGD(overlap=True)` have parameters under way and
        `AllReduce(double_buffering=True)` a gradient; `ParameterSkipping` has parameters that were skipped, which it
        averages.
        """
        strategy = self._strategy
        with self._claim.stepping():
            strategy.do_together(lambda: strategy.drain(self._inner))
        strategy.context.returned()

    @property
    def distances(self) -> list[tuple[int, float]]:
        """Of `LocalSGD(log_distance=...)`: steps, and how far the local models were from their mean after them."""
        return self._strategy.distances

    @property
    def statistics(self) -> Any:
        """What algorithms have counted that count what they do. NoSuchAttribute for others.

        Of `ParameterSkipping` (`SkippingStatistics`): what has stayed unchanged, what was skipped, and what was sent;
        of `ScheduledPull` (`PullStatistics`) and `ADPSGD` (`PairStatistics`): what was averaged, and what it cost this
        rank.
        """
        return self._strategy.statistics

    def report_metric(self, metric: float) -> None:
        """Tell an algorithm that adapts itself how training goes. Collective.

        Tell `LocalSGD(adaptive=...)` the loss, whenever it is known, `ParameterSkipping` the metric that its scheduler
        is for, at the end of each epoch.

        Args:
            metric: this rank's; the mean over all ranks counts.
        """
        self._strategy.report_metric(metric, float(self._inner.param_groups[0]["lr"]))
        self._strategy.context.returned()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Have `step()` not synchronize within the block: for use after an explicit `synchronize()`."""
        problem = self._strategy.skip_problem()
        if problem is not None:
            raise StepOrderError(problem)
        self._may_synchronize = False
        try:
            yield
        finally:
            self._may_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Reduce what is not reduced yet and run the wrapped optimizer's step.

        Args:
            closure: as of the wrapped optimizer; gradients are reduced after each evaluation of it.
        """
        if dcp.MODULE in sys.modules and dcp.makes_state():
            with self._claim.stepping():
                return self._inner.step()
        if self._may_synchronize and self._asked and self._strategy.done:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). "
                "The gradients are not reduced again; Horovod would.",
                stacklevel=2,
            )
        self._asked = False
        reducer = self._strategy.reducer
        if reducer is not None and reducer.backwards:
            reducer.require_whole("step()")
        if self._claim.has_changed():
            self._take_in_changes()
        recorder = self._strategy.context.recorder
        if recorder is not None:
            recorder.begins()
        claim = self._claim
        claim.open = True  # by hand: stepping() would cost each step two calls
        claim.steps += 1
        try:
            if "found_inf" in self.__dict__:  # GradScaler calls
                synchronize, checks = self._may_synchronize, self._options.check_finite
                result = step_scaled(self, self._strategy, self._inner, closure, synchronize, checks)
            else:
                result = self._strategy.step(self._inner, closure, self._may_synchronize)
        finally:
            claim.open = False
        if recorder is not None:
            recorder.step(self._strategy.noted())
        return result

    def _between_steps(self, what: str) -> None:
        """Raise StepOrderError where gradients have been reduced, or begun to be, for a step that is still to come."""
        if self._strategy.in_flight or self._strategy.done:
            raise StepOrderError(f"{what} was called between backward and step()")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, as of the wrapped optimizer.

        StepOrderError while gradients are being reduced (`gradients_ready()`).
        """
        self._strategy.clear(self._inner, set_to_none)
